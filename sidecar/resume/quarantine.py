"""Remembers which commits failed verification and why, across restarts: each is tried once, not at every start."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from sidecar.volume.files import publish

log = structlog.get_logger()

UNREADABLE = "unreadable"
"""In place of the checksum of a commit that could not be read at all."""


@dataclass(frozen=True, slots=True)
class _Entry:
    crc: str
    reason: str
    at_s: float
    """When it was found out, in epoch seconds."""


class Quarantine:
    """Commits by name and checksum: one that is written anew starts with a clean slate."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, _Entry] = {}
        try:
            known = json.loads(path.read_bytes())
            self._known = {
                str(name): _Entry(str(said["crc"]), str(said["reason"]), float(said.get("at_s", 0.0)))
                for name, said in known.items()
            }
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            self._known = {}

    def reason(self, name: str, crc: str) -> str | None:
        """Return why a commit is not used, or ``None`` if nothing is known against it."""
        known = self._known.get(name)
        return known.reason if known and known.crc == crc else None

    def reasons(self) -> dict[str, str]:
        """Return all, by name."""
        return {name: known.reason for name, known in self._known.items()}

    def add(self, name: str, crc: str, reason: str) -> None:
        """A commit failed verification."""
        self._known[name] = _Entry(crc, reason, time.time())
        self._write()

    def release(self, name: str, *, committed_at_s: float | None = None) -> None:
        """Forget what is known of a name.

        Args:
            name: The checkpoint.
            committed_at_s: When the commit that stands now was written: one older than the finding is the same one.
                ``None``: it was verified just now.
        """
        known = self._known.get(name)
        if known is not None and (committed_at_s is None or committed_at_s > known.at_s):
            del self._known[name]
            self._write()

    def _write(self) -> None:
        try:
            publish(self._path, json.dumps({name: asdict(known) for name, known in self._known.items()}).encode())
        except OSError as error:
            log.warning("quarantine_not_written", error=str(error))
