"""A training script that saves as fast as it can, by ``trainer_hook.plain``, at each step.

Arguments: how many checkpoints it saves until it ends, their size in bytes, and the seconds of a step.
"""

import os
import sys
import time
from pathlib import Path

from trainer_hook.plain import latest, save, stopping

SAVES, SIZE_BYTES, STEP_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def write(folder: Path) -> None:
    """Write a checkpoint of random bytes, in blocks."""
    with (folder / "model").open("wb", buffering=0) as file:
        for _ in range(SIZE_BYTES >> 18):
            file.write(os.urandom(1 << 18))


resumed = latest()
step = int(resumed.name.rpartition("-")[2]) if resumed else 0
stopping()  # from now on SIGTERM does not end this process
print("resumed", step, flush=True)
saved = 0
while saved < SAVES:
    step += 1
    time.sleep(STEP_S)
    stop = stopping()
    is_saved = save(step, write)
    saved += is_saved
    print("saved" if is_saved else "skipped", step, flush=True)
    if stop:
        sys.exit(143)
