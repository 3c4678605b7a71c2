"""A training that is nothing but a lease and files, beside a real sidecar."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer_hook.contract import rfc3339


class Training:
    """Holds the lease of rank 0, and writes what the hook writes."""

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        self.step = 0

    def at(self, step: int, **more: Any) -> None:
        """Reach a step."""
        self.step = step
        state = {
            "state": "running",
            "attempt": "a1",
            "step": step,
            "world_size": 1,
            "pid": 1,
            "updated_at": rfc3339(time.time()),
        }
        written = self.volume / ".ckpt/trainer.tmp"
        written.write_text(json.dumps(state | {"total_steps": 1000, "loss": 1.234} | more))
        written.rename(self.volume / ".ckpt/trainer.json")

    def save(self, step: int, size_bytes: int = 1 << 20, *, reason: str = "periodic", took_s: float = 0.0) -> None:
        """Save a step. ``took_s``: from its first file to its marker."""
        folder = self.volume / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(os.urandom(size_bytes))
        time.sleep(took_s)
        marker = {
            "step": step,
            "reason": reason,
            "attempt": "a1",
            "created_at": rfc3339(time.time()),
            "global_step_seconds": 0.05,
            "world_size": 1,
        }
        (folder / ".complete").write_text(json.dumps(marker))

    def request(self) -> Any:
        """Return the sidecar's request to save; ``None``: there is none."""
        path = self.volume / ".ckpt/request.json"
        return json.loads(path.read_text()) if path.exists() else None

    def answer(self, step: int) -> None:
        """Save on request."""
        asked = self.request()
        self.save(step, reason="manual")
        answer = {"id": asked["id"], "outcome": "saved", "checkpoint": f"checkpoint-{step}", "at": rfc3339(time.time())}
        (self.volume / ".ckpt/answer.json").write_text(json.dumps(answer))


@contextmanager
def training(volume: Path) -> Iterator[Training]:
    """Train for the length of the context."""
    with (volume / ".ckpt/ranks/0.lease").open("w") as lease:
        fcntl.lockf(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Training(volume)
