"""A trainer without PyTorch, which starts at once: its weights are a chain of hashes, and tell whether each step was done once.

Settings, all optional: STEPS, STEP_S (seconds of a step), SAVE_EVERY (steps), SAVE_S (seconds of a save), SIZE_MIB (of a
checkpoint). TROUBLE happens at step TROUBLE_AT of the first life: ``memory`` takes memory without end, ``disk`` writes 200 MB
beside the volume.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

STEPS = int(os.environ.get("STEPS", "100"))
STEP_S = float(os.environ.get("STEP_S", "0.1"))
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "20"))
SAVE_S = float(os.environ.get("SAVE_S", "0"))
SIZE_MIB = int(os.environ.get("SIZE_MIB", "1"))
TROUBLE, TROUBLE_AT = os.environ.get("TROUBLE"), int(os.environ.get("TROUBLE_AT", "0"))
BLOCKS = 16


def weights_after(steps: int) -> str:
    """Return the final digest of a run of that number of steps, which does not depend on interruptions."""
    state = b""
    for step in range(1, steps + 1):
        state = _next(state, step)
    return state.hex()


def _next(state: bytes, step: int) -> bytes:
    return hashlib.sha256(state + str(step).encode()).digest()


def _write(folder: Path, step: int, state: bytes) -> None:
    (folder / "state.json").write_text(json.dumps({"step": step, "state": state.hex()}))
    block = state * ((SIZE_MIB << 20) // BLOCKS // len(state))
    with (folder / "weights.bin").open("wb") as file:
        for _ in range(BLOCKS):
            file.write(block)
            file.flush()
            time.sleep(SAVE_S / BLOCKS)


def _trouble() -> None:
    if TROUBLE == "memory":
        held = []
        while True:
            held.append(bytearray(16 << 20))
    if TROUBLE == "disk":
        Path("/tmp/much").write_bytes(bytes(200 << 20))
        time.sleep(600)


def main() -> None:
    from trainer_hook.plain import latest, save, stopping

    step, state = 0, b""
    if (folder := latest()) is not None:
        found = json.loads((folder / "state.json").read_text())
        step, state = found["step"], bytes.fromhex(found["state"])
    print(f"starts after step {step}", flush=True)
    resumed = folder is not None
    while step < STEPS:
        stop = stopping()
        if not stop:
            time.sleep(STEP_S)
            step += 1
            state = _next(state, step)
            print(f"step {step}", flush=True)
            if step == TROUBLE_AT and not resumed:
                _trouble()
            stop = stopping()
        if stop or step % SAVE_EVERY == 0 or step == STEPS:
            print(f"saves {step}", flush=True)
            save(step, lambda folder: _write(folder, step, state))  # noqa: B023 - called at once
        if stop:
            sys.exit(143)
    print(f"weights {state.hex()}", flush=True)


if __name__ == "__main__":
    main()
