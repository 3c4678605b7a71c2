"""Which user of a volume (a run, or a node of a job) left which of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class VolumeUser:
    """One that used the volume."""

    versions: frozenset[str] = field(default=frozenset(), kw_only=True)
    """Versions of the finished checkpoints that it left; of the present user: none."""


User = TypeVar("User", bound=VolumeUser)


def taken_over(
    before: Sequence[User], me: User, present: Collection[str], *, is_same: Callable[[User, User], bool], most: int
) -> list[User]:
    """Return the users of a volume once ``me`` uses it, the present one first. What no other user left is of the latest one.

    Args:
        before: The users until now, the latest first; none: the volume is new, or an earlier version used it.
        me: The present user.
        present: Versions of all finished checkpoints on the volume.
        is_same: Whether two records are of one user.
        most: Number of users that are remembered, the latest ones.
    """
    users, there = list(before), frozenset(present)
    if users:
        users[0] = replace(users[0], versions=there.difference(*(user.versions for user in users[1:])))
    others = [replace(user, versions=user.versions & there) for user in users if not is_same(user, me)]
    return [replace(me, versions=frozenset()), *(user for user in others if user.versions)][:most]
