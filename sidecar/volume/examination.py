"""Examination of a volume for ``doctor``: what the sidecar does there is tried in a directory that is removed again."""

from __future__ import annotations

import os
import re
import select
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sidecar.core.planning.volume_diagnosis import VolumeFacts
from sidecar.volume import inotify
from sidecar.volume.bulk import link_files
from sidecar.volume.opener import Folder, Place
from trainer_hook.contract import is_checkpoint_name

PREFIX = ".ckpt-probe-"
_PROBE = re.compile(re.escape(PREFIX) + r"[0-9a-f]{32}", re.ASCII)
ABANDONED_S = 3600.0
"""Age in seconds from which the directory of another examination counts as left by one that was killed."""
REPORTED_WITHIN_MS = 2000
_WATCHES = Path("/proc/sys/fs/inotify/max_user_watches")


def examine_volume(path: Path, *, state: Path | None = None) -> VolumeFacts:
    """Try what the sidecar does on a volume, and leave nothing there. Errors of the volume are facts. Blocks.

    Args:
        path: The directory that trainer and sidecar share. It is never created.
        state: ``CKPT_STATE_DIR``, which has to be writable, too; ``None``: there is none.
    """
    facts = VolumeFacts(str(path), os.geteuid(), tuple(dict.fromkeys([os.getegid(), *os.getgroups()])))
    root = Folder(path) / ""
    try:
        status, names, space = root.status(), root.entries(), root.space()
    except OSError as error:
        return replace(facts, missing=_said(error))
    checkpoints = [name for name, is_folder in names if is_folder and is_checkpoint_name(name)]
    facts = replace(
        facts,
        owner=status.st_uid,
        group=status.st_gid,
        mode=stat.S_IMODE(status.st_mode),
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        other_owners=_other_owners(root, checkpoints),
        watches=_watches(),
        state_error=None if state is None else _state_error(state),
    )
    return _tried(root, names, facts)


def _tried(root: Place, names: list[tuple[str, bool]], facts: VolumeFacts) -> VolumeFacts:
    probe = root / f"{PREFIX}{uuid.uuid4().hex}"
    for name, _ in names:
        _discard_abandoned(root, name)
    try:
        write_error = _error_of(lambda: _write(probe))
        if write_error is not None:
            return replace(facts, write_error=write_error)
        return replace(
            facts,
            inotify_error=_error_of(lambda: _watch(probe)),
            link_error=_error_of(lambda: link_files(probe, probe / "linked", ["file"])),
            rename_error=_error_of(lambda: _rename(probe)),
        )
    finally:
        probe.discard()


def _write(probe: Place) -> None:
    probe.make_folder()
    (probe / "file").publish(b"doctor")


def _rename(probe: Place) -> None:
    (probe / "before").make_folder()
    (probe / "before" / "file").publish(b"doctor")
    (probe / "before").rename(probe / "after")
    (probe / "after" / "file").status()


def _watch(probe: Place) -> None:
    fd = inotify.init()
    try:
        with probe.listed() as folder:
            inotify.add_watch(fd, folder, inotify.CREATE | inotify.MOVED_TO)
        (probe / "seen").publish(b"")
        if not select.select([fd], [], [], REPORTED_WITHIN_MS / 1000)[0]:
            raise TimeoutError(0, "a change was not reported within 2 s")
    finally:
        os.close(fd)


def _error_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except OSError as error:
        return _said(error)
    return None


def _said(error: OSError) -> str:
    return error.strerror or str(error)


def _discard_abandoned(root: Place, name: str) -> None:
    if _PROBE.fullmatch(name):
        with suppress(OSError):
            if time.time() - (root / name).status().st_mtime > ABANDONED_S:
                (root / name).discard()


def _other_owners(root: Place, names: list[str]) -> tuple[int, ...]:
    owners = set()
    for name in names:
        with suppress(OSError):
            owners.add((root / name).status().st_uid)
    return tuple(sorted(owners - {os.geteuid()}))


def _watches() -> int | None:
    try:
        return int(_WATCHES.read_text())
    except (OSError, ValueError):
        return None


def _state_error(path: Path) -> str | None:
    place = Folder(path) / f"{PREFIX}{uuid.uuid4().hex}"
    try:
        return _error_of(lambda: place.publish(b""))
    finally:
        place.discard()
