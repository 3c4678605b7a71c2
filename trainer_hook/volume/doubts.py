"""Reasons not to resume from a finished checkpoint on the volume, for a hook without a sidecar: the same as the sidecar's."""

from __future__ import annotations

from pathlib import Path

from trainer_hook import contract
from trainer_hook.contract.typed_json import json_object
from trainer_hook.volume.checkpoint_folder import LocalCheckpoint, listed_files
from trainer_hook.volume.retry import retried


def of_other_runs(volume: Path) -> frozenset[str]:
    """Return the marker versions of the checkpoints that other runs left on the volume, as its sidecar recorded them.

    Raises ``OSError``: the record cannot be read now, and any checkpoint may be of another run.
    """
    try:
        raw = retried((volume / contract.RUNS).read_bytes)
        runs = json_object(raw, what=contract.RUNS).get("runs")
    except (FileNotFoundError, NotADirectoryError, PermissionError, contract.ContractError):
        return frozenset()
    others = [run.get("versions") for run in runs[1:] if isinstance(run, dict)] if isinstance(runs, list) else []
    return frozenset(version for each in others if isinstance(each, list) for version in each if isinstance(version, str))


def is_among(versions: frozenset[str], folder: Path) -> bool:
    """Whether the marker of a checkpoint has one of these versions, or may have: it cannot be read."""
    if not versions:
        return False
    try:
        status = (folder / contract.MARKER).stat()
    except OSError:
        return True
    return contract.version_of(status.st_ino, status.st_size, status.st_mtime_ns) in versions


def reason_not_to_use(volume: Path, local: LocalCheckpoint, others: frozenset[str]) -> str | None:
    """Return why no run should continue from a checkpoint; ``None``: nothing is known against it.

    ``others``: ``of_other_runs``.
    """
    folder, marker = volume / local.name, local.marker
    try:
        marked = (folder / contract.MARKER).stat()
        if is_among(others, folder):
            return "another run left it"
        files = listed_files(folder) if marker.files is None else marker.files
        changed_ns = ((file.path, (folder / file.path).stat().st_mtime_ns) for file in files)
        if (later := contract.written_after(changed_ns, marked.st_mtime_ns)) is not None:
            return f"{later} was written after the marker"
    except (OSError, contract.ContractError) as error:
        return str(error)
    if contract.META_RESTORED in marker.meta and not contract.was_downloaded_in(marker.meta, _boot_id()):
        return "it was downloaded before the machine started again, which may have cost data that was not on the disk"
    return None


def _boot_id() -> str:
    """Return the id of the present run of the kernel; empty: unknown."""
    try:
        return Path(contract.BOOT_ID).read_text().strip()
    except OSError:
        return ""
