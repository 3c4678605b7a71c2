"""Remainder of a deletion: what a process that ended in the middle of it has left of a checkpoint (FORMAT.md, I4)."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.format import keys


def last_write(modified: Mapping[str, str]) -> str | None:
    """Return the time of the latest write to a checkpoint; ``None``: the store does not tell the time of each object.

    ``modified``: time of the write of each object by the store's clock, as text that sorts chronologically; empty: unknown.
    """
    times = modified.values()
    return max(times) if times and all(times) else None


def is_remainder(name: str, modified: Mapping[str, str], *, before: str) -> bool:
    """Whether all objects of a checkpoint are what its deletion left, so that nobody is writing it.

    Something written after the deletion began, and be it one object, belongs to another writing of the step, which may also use
    objects that it found: then all stay. Records of quarantine are of the deleted commit, and come at any time.

    Args:
        name: Name of the checkpoint.
        modified: Every object below its folder, as of ``last_write``.
        before: The latest write when its deletion began.
    """
    if keys.commit(name) in modified:
        return False
    return all("" < at <= before for key, at in modified.items() if not keys.is_of_commit_alone(key, name))
