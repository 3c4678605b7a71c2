"""For those who write and read their own files: where to continue, the marker, and when to stop. Standard library only.

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

With several processes (torch.distributed) every rank calls each function at the same step; all get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook.process.log import say
from trainer_hook.process.session import Session, session_from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.saving.step_monitor import StepMonitor
from trainer_hook.saving.step_saver import StepSaver

__all__ = ["latest", "save", "stopping"]


def latest() -> Path | None:
    """Return the folder of the newest complete checkpoint, on the volume; ``None`` where there is none, or no volume.

    It waits for the sidecar's download, at most ``CKPT_RESUME_TIMEOUT_S``.
    """
    session = session_from_environment()
    if session is None:
        return None
    resumer = Resumer(session.settings, session.client, session.join(), missing=lambda *_, **__: [], reads_all=True)
    choice = resumer.choose(session.train_calls)
    if choice is None:
        say("no checkpoint to resume from")
        return None
    session.continues_from(choice.name, attempt=choice.attempt)
    say(f"resumes from {choice.name}")
    return choice.path


def save(step: int, write: Callable[[Path], Any]) -> bool:
    """Make ``checkpoint-<step>``: call ``write`` with its folder, then write the marker.

    Returns:
        Whether it is there. A failure of ``write`` is logged and its folder removed; it does not stop training. A step is
        saved once: again is no error and changes nothing.
    """
    session = session_from_environment()
    if session is None:
        return False
    saver = _PlainSaver(session, write)
    saved = saver.save(None, step, "jit" if session.stop.told_at_s is not None else "periodic")
    if (pace := _paces.get(session.pid)) is not None:
        pace.saved(step, ok=saved)
    session.last_step = step
    session.outcome = "succeeded"  # unless an exception or a signal ends this process
    return saved


def stopping() -> bool:
    """Whether the pod is going, or the sidecar asks to stop: save and exit with code 143.

    From the first call on SIGTERM no longer ends the process by itself: go on calling it.
    """
    session = session_from_environment()
    if session is None:
        return False
    pace = _paces.get(session.pid)
    if pace is None:
        pace = _paces[session.pid] = StepMonitor(session)
        session.stop.begin_training()
        pace.begin(session.last_step)
    if not _told.get(session.pid):
        _told[session.pid] = pace.inside("train").stop
    return _told[session.pid]


_paces: dict[int, StepMonitor] = {}
_told: dict[int, bool] = {}
"""By process: once told to stop it stays so."""


class _PlainSaver(StepSaver):
    def __init__(self, session: Session, write: Callable[[Path], Any]) -> None:
        super().__init__(session)
        self._write_files = write

    def _write(self, model: Any, global_step: int) -> None:
        folder = self._volume / self.name(global_step)
        folder.mkdir(parents=True, exist_ok=True)
        self._write_files(folder)
