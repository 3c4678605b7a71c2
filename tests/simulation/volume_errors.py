"""Lets one call of the sidecar, or of the hook, to its volume fail."""

from __future__ import annotations

import io
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = f"{Path(__file__).parents[2]}{os.sep}"
CALLS = (
    *("access", "chmod", "fchmod", "fstat", "fsync", "link", "listdir", "lstat", "mkdir", "open", "pread", "preadv", "read"),
    *("readlink", "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "truncate", "unlink", "utime", "write"),
)
"""Functions of ``os``; those of ``pathlib`` go through them."""
VOLUMES = "/dev/shm/simulation-"
FRAMES = 3
"""Innermost frames of the sidecar's code that tell one place from another."""


class FailingCall:
    """Counts the calls to a volume, and lets the ``which``-th one fail; ``None``: none. ``below``: its path begins so."""

    def __init__(self, which: int | None, number: int, *, below: str = VOLUMES) -> None:
        self._below = below
        self.count = 0
        self.places: dict[str, list[int]] = defaultdict(list)
        """Numbers of the calls by where they were made."""
        self.failed: str | None = None
        """Where the call was made that failed."""
        self._which = which
        self._number = number

    @contextmanager
    def active(self) -> Iterator[None]:
        with patch.multiple(os, **{name: self._failing(name, getattr(os, name)) for name in CALLS}):
            opening = self._failing("open", io.open)
            with patch("io.open", opening), patch("builtins.open", opening):
                yield

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(of: Any, *arguments: Any, **options: Any) -> Any:
            is_on_volume = options.keys() & {"dir_fd", "src_dir_fd"} or _path(of).startswith(self._below)
            if is_on_volume and (frames := _frames_of_sidecar()):
                self.count += 1
                self.places[f"{name} <- {' <- '.join(frames)}"].append(self.count)
                if self.count == self._which:
                    self.failed = f"{name} {of} <- {' <- '.join(frames)}"
                    raise OSError(self._number, os.strerror(self._number), None if isinstance(of, int) else of)
            return real(of, *arguments, **options)

        return call


def _path(of: Any) -> str:
    try:
        return str(Path(f"/proc/self/fd/{of}").readlink() if isinstance(of, int) else os.fsdecode(of))
    except (OSError, TypeError):
        return ""


def _frames_of_sidecar() -> list[str]:
    """Return the frames between this call and the simulation's own code; empty: the simulation made the call itself."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < FRAMES:
        path = frame.f_code.co_filename
        if path.startswith(f"{ROOT}tests{os.sep}"):
            break
        if path.startswith((f"{ROOT}sidecar{os.sep}", f"{ROOT}trainer_hook{os.sep}")):
            found.append(f"{path.removeprefix(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return found
