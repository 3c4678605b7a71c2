"""A training loop with Hugging Face Accelerate: a small network learns sines. Three lines of it are about checkpoints.

At the end it prints a digest of the weights, so that two runs can be compared bit for bit.
"""

import argparse
import hashlib
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from trainer_hook.accelerate import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slows the loop down, to have time to look at it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(7)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    x = torch.rand(256, 1) * 6
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=8, shuffle=True)
    layers = [torch.nn.Linear(1, options.width), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(options.width, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    with Checkpointer(accelerator) as ckpt:
        for epoch in ckpt.epochs(options.epochs):
            for inputs, targets in ckpt.steps(loader):
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    accelerator.print(f"step {ckpt.global_step + 1} epoch {epoch} loss {loss.item():.4f}", flush=True)
                    time.sleep(options.step_seconds)

    digest = hashlib.sha256()
    for name, tensor in sorted(accelerator.unwrap_model(model).state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    accelerator.print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
