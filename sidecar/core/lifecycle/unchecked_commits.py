"""Which commits a starting sidecar compares with their objects: an earlier pod may have ended before its own checks."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.lifecycle.fencing import seconds_of

UNCHECKED_S = 75.0
"""Seconds before the latest commit within which commits are checked. The last check of a new commit is due after 65 s, because
a request of an earlier attempt may be that late; a commit that was followed by a newer one is not checked that long."""
MOST = 8
"""Maximum number of commits that a start checks, and of those whose times it asks for: the highest steps."""


def unchecked_commits(written: Mapping[str, str]) -> list[str]:
    """Return the commits whose checks may be missing, by the store's clock alone: latest first, at most ``MOST``.

    The pod that wrote the latest commit lived at that time, so checks that were due before it are not missing.

    ``written``: time of each commit's write, as the store lists it, by name. One without a known time is not returned.
    """
    times = {name: at_s for name, modified in written.items() if (at_s := seconds_of(modified)) is not None}
    latest_s = max(times.values(), default=0.0)
    recent = [name for name, at_s in times.items() if latest_s - at_s <= UNCHECKED_S]
    return sorted(recent, key=lambda name: (-times[name], name))[:MOST]
