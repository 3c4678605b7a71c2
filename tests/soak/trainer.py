"""A cheap training script: a small checkpoint each second, by the hook (``python -m trainer_hook run -- python -m …``)."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from trainer_hook.plain import latest, save, stopping

STEPS = 10
"""Between two saves."""
EVERY_S = 1.0
SIZES = {"model.bin": 40_000, "optimizer.bin": 80_000, "state.json": 300}


def content(step: int, path: str) -> bytes:
    """Return the bytes of a file of a step."""
    return random.Random(f"{step} {path}").randbytes(SIZES[path])


def write(folder: Path, step: int) -> None:
    for path in SIZES:
        (folder / path).write_bytes(content(step, path))


def main() -> None:
    folder = latest()
    step = int(folder.name.removeprefix("checkpoint-")) if folder else 0
    due_s = time.monotonic()
    while True:
        due_s += EVERY_S
        stop = stopping()
        step += STEPS
        if not save(step, lambda folder, step=step: write(folder, step)):  # type: ignore[misc]
            sys.exit(f"step {step} was not saved")
        if stop:
            sys.exit(143)
        while (left_s := due_s - time.monotonic()) > 0 and not stopping():
            time.sleep(min(left_s, 0.1))


if __name__ == "__main__":
    main()
