"""A plain PyTorch loop on the device that is named, with the hook's three lines."""

import argparse
import hashlib
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_hook.torch import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--half", action="store_true", help="mixed precision with a gradient scaler")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    x = torch.rand(128, 1) * 6
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=8, shuffle=True)
    layers = [torch.nn.Linear(1, options.width), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(options.width, 1)]
    model = torch.nn.Sequential(*layers).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # It grows every 5 steps, so a run that resumes without its state has another scale.
    scaler = torch.amp.GradScaler(options.device, init_scale=256.0, growth_interval=5, enabled=options.half)
    with Checkpointer(model=model, optimizer=optimizer, scaler=scaler) as ckpt:
        for _ in ckpt.epochs(3):
            for inputs, targets in ckpt.steps(loader):
                with torch.autocast(options.device, torch.float16, enabled=options.half):
                    loss = torch.nn.functional.mse_loss(model(inputs.to(options.device)), targets.to(options.device))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                print(f"step {ckpt.global_step + 1} done", flush=True)
                time.sleep(options.step_seconds)
    print(f"device {next(model.parameters()).device.type}", flush=True)
    digest = hashlib.sha256(str(scaler.get_scale()).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
