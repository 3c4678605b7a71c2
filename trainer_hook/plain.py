"""For scripts that write and read their own files: the checkpoint to resume from, the marker, when to stop. No dependencies.

```python
from trainer_hook.plain import latest, save, stopping

folder = latest()                  # on the volume and complete, or None
for step in range(first, last):
    ...
    stop = stopping()
    if stop or step % 100 == 0:
        save(step, lambda folder: (folder / "state.bin").write_bytes(state))
    if stop:
        sys.exit(143)
```

With several processes (torch.distributed) every rank calls each function at the same step, and gets the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook.contract import step_of
from trainer_hook.process.log import info
from trainer_hook.process.rank_consensus import World
from trainer_hook.process.session import session_from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.saving.step_monitor import StepMonitor
from trainer_hook.saving.step_saver import StepSaver, StepWriter

__all__ = ["latest", "save", "stopping"]


def latest() -> Path | None:
    """Return the folder of the newest complete checkpoint; ``None``: there is none, or no volume.

    Waits for the sidecar's download, at most ``CKPT_RESUME_TIMEOUT_S``.
    """
    session = session_from_environment()
    if session is None:
        return None
    resumer = Resumer(session.settings, session.client, session.join_again(), missing=lambda *_, **__: [], reads_all=True)
    choice = resumer.choose(session.train_calls)
    if choice is None:
        info("no checkpoint to resume from")
        return None
    session.continues_from(choice.name, attempt=choice.attempt)
    # No success yet: a helper of a shell script may only ask for the folder, and a classic sidecar would end with it.
    session.tell_state("running", step_of(choice.name) or 0)
    info(f"resumes from {choice.name}")
    return choice.path


def save(step: int, write: Callable[[Path], Any]) -> bool:
    """Make ``checkpoint-<step>``: call ``write`` with its folder, then write the marker.

    Returns:
        Whether the checkpoint is there. A failure of ``write`` is logged and its folder removed; training goes on. A step is
        saved once: a repeated call changes nothing.
    """
    session = session_from_environment()
    if session is None:
        return False
    world = session.join_again().world
    if (saving := _saving.get(session.pid)) is None or saving[2] != world:
        writer = _Writer(write)
        saving = _saving[session.pid] = writer, StepSaver(session, writer), world
    writer, saver, _ = saving
    writer.write_files = write
    is_urgent = session.stop.notice_at_s is not None
    if is_urgent:
        saver.make_room()
    try:
        saved = saver.save(step, "jit" if is_urgent else "periodic")
    finally:
        writer.write_files = _nothing  # what the script passed may hold its model
    if (monitor := _monitors.get(session.pid)) is not None:
        monitor.saved(step, ok=saved)
    session.last_step = step
    session.outcome = "succeeded"  # unless an exception or a signal ends this process
    return saved


def stopping() -> bool:
    """Whether the pod is being terminated, or the sidecar asks to stop: save and exit with code 143.

    From the first call on SIGTERM does not end the process: the script has to call this regularly.
    """
    session = session_from_environment()
    if session is None:
        return False
    session.join_again()
    monitor = _monitors.get(session.pid)
    if monitor is None:
        monitor = _monitors[session.pid] = StepMonitor(session)
        session.stop.is_training = True
        session.outcome = "succeeded"  # as after a save: also of a loop that ends before its next one
        monitor.begin(session.last_step)
    if session.pid not in _stopping and monitor.inside("train").stop:
        _stopping.add(session.pid)
    return session.pid in _stopping


_monitors: dict[int, StepMonitor] = {}
"""By process: a forked child has its own."""
_stopping: set[int] = set()
"""Processes that are to stop: the answer stays."""


class _Writer(StepWriter):
    def __init__(self, write: Callable[[Path], Any]) -> None:
        self.write_files = write

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.write_files(folder)


def _nothing(_: Path) -> None:
    """Stand in for the script's function between two saves."""


_saving: dict[int, tuple[_Writer, StepSaver, World]] = {}
"""What saves, by process, and for which ranks: it knows the size of the last checkpoint, and what it has warned of."""
