"""A plain PyTorch training loop: a small network learns sines. Three lines of it are about checkpoints.

At the end it prints a digest of the weights, so that two runs can be compared bit for bit.
"""

import argparse
import hashlib
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_hook.torch import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slows the loop down, to have time to look at it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(7)
    x = torch.rand(128, 1) * 6
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=8, shuffle=True, num_workers=options.workers)
    layers = [torch.nn.Linear(1, options.width), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(options.width, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    with Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
        for epoch in ckpt.epochs(options.epochs):
            for inputs, targets in ckpt.steps(loader):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {ckpt.global_step + 1} epoch {epoch} loss {loss.item():.4f}", flush=True)
                time.sleep(options.step_seconds)
            scheduler.step()

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
