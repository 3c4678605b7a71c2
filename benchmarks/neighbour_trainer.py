"""A small training loop in one thread, and the Kubeflow SDK's way of uploading beside it: a thread of the same process.

python -m benchmarks.neighbour_trainer SECONDS [ENDPOINT BUCKET KEYPREFIX DIR]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from benchmarks.peers import s3fs_files
from benchmarks.peers.program import Transfer

WARM_UP_S = 2.0
WIDTH, LAYERS, BATCH = 256, 4, 64


def train(seconds: float) -> float:
    """Return steps per second."""
    import torch

    torch.set_num_threads(1)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model, batch = torch.nn.Sequential(*layers), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps_until(end_s: float) -> int:
        count = 0
        while time.monotonic() < end_s:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            count += 1
        return count

    steps_until(time.monotonic() + WARM_UP_S)
    began_s = time.monotonic()
    return steps_until(began_s + seconds) / (time.monotonic() - began_s)


def upload_again_and_again(transfer: Transfer, uploaded: list[float]) -> None:
    """Upload until the process ends; ``uploaded`` gets the time of each end."""
    while True:
        s3fs_files.up(transfer)
        uploaded.append(time.monotonic())


def main(seconds: float, transfer: Transfer | None) -> None:
    """Print the steps per second, and the uploads per second."""
    uploaded: list[float] = []
    began_s = time.monotonic()
    if transfer:
        threading.Thread(target=upload_again_and_again, args=(transfer, uploaded), daemon=True).start()
    steps_per_s = train(seconds)
    uploads_per_s = len(uploaded) / (uploaded[-1] - began_s) if uploaded else 0.0
    print(json.dumps({"steps_per_s": steps_per_s, "uploads_per_s": uploads_per_s}), flush=True)
    os._exit(0)  # in the middle of an upload


if __name__ == "__main__":
    how_long, endpoint, bucket, prefix, folder = [*sys.argv[1:], "", "", "", ""][:5]
    main(float(how_long), Transfer(endpoint, bucket, prefix, Path(folder)) if folder else None)
