"""Which unfinished uploads in the store belong to nobody any more."""

from __future__ import annotations

from collections.abc import Collection

from sidecar.core import keys
from trainer_hook.contract import step_of

PROBE_S = 3600.0
"""A start-up probe that is older than this belongs to a process that died in it."""


def is_leftover(
    key: str, upload_id: str, *, age_s: float, known: Collection[str], alone: bool, newest_committed_step: int | None
) -> bool:
    """Whether an unfinished upload below our prefix can be aborted.

    Args:
        key: Relative to the prefix.
        upload_id: The store's.
        age_s: Since it was begun, by the store's clock.
        known: Ids of the uploads that this node's journals continue.
        alone: This node is the whole job. Otherwise uploads of other nodes look like leftovers of ours.
        newest_committed_step: Below it nothing is written by any node that is up to date.
    """
    if upload_id in known:
        return False
    if key.startswith(keys.PROBE):
        return alone or age_s > PROBE_S
    step = step_of(key.partition("/")[0])
    return alone or (step is not None and newest_committed_step is not None and step < newest_committed_step)
