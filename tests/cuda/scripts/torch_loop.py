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
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        for _ in ckpt.epochs(3):
            for inputs, targets in ckpt.steps(loader):
                loss = torch.nn.functional.mse_loss(model(inputs.to(options.device)), targets.to(options.device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {ckpt.global_step + 1} done", flush=True)
                time.sleep(options.step_seconds)
    print(f"device {next(model.parameters()).device.type}", flush=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
