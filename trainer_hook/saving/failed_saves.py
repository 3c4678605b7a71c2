"""What is said of a save that failed: what stands, how much space it lacks, and what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from trainer_hook import contract
from trainer_hook.process.log import warn
from trainer_hook.process.session import Session
from trainer_hook.volume.checkpoint_folder import finished_on, listed_files, remove
from trainer_hook.volume.space import described, free_bytes, is_of_full_volume, lack_of_space


def save_failed(session: Session, name: str, error: Exception, *, expected_bytes: int, folders: Iterable[Path]) -> None:
    """Delete what was written of a save that failed, log it, and tell the sidecar.

    Args:
        session: Of the process that saved.
        name: Of the checkpoint.
        error: Why it failed.
        expected_bytes: Size of the save by the ones before; 0: unknown.
        folders: Of its files.
    """
    volume = session.settings.dir
    why, written_bytes = described(error, volume), 0
    for folder in folders:
        written_bytes += _bytes_in(folder)
        with contextlib.suppress(OSError):
            remove(folder)
    older = [each.name for each in finished_on(volume) if each.name != name]
    newest = max(older, key=lambda other: contract.step_of(other) or 0, default=None)
    stands = f"{newest} stands" if newest else "no finished checkpoint is on the volume"
    text = f"{name} could not be saved ({why}); {stands}"
    if is_of_full_volume(why):
        free = None
        with contextlib.suppress(OSError):
            free = free_bytes(volume)
        lack = lack_of_space(
            why, expected_bytes=expected_bytes, written_bytes=written_bytes, free_bytes=free, has_checkpoints=bool(older)
        )
        text = f"{text}; {lack}"
    warn(text)
    session.not_saved[name] = None
    session.tell_saves(text)


def tell_unreadable(found: Callable[[], list[str]]) -> None:
    """Say why every save will fail, before the first one, which may be that at SIGTERM. ``found`` returns the reasons."""
    try:
        reasons = found()
    except Exception as error:
        reasons = [f"{type(error).__name__}: {error}"]
    for reason in reasons:
        warn(f"nothing can be saved while this is so: {reason}")


def _bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder, as far as they can be seen."""
    try:
        return sum(file.size_bytes for file in listed_files(folder))
    except (OSError, contract.ContractError):
        return 0
