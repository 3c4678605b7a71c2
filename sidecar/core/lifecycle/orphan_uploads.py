"""Orphan uploads: unfinished multipart uploads in the store that no living pod continues."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sidecar.core.format import keys
from sidecar.core.lifecycle.phases import LONGEST_GRACE_S
from trainer_hook.contract import FINAL, step_of

MARGIN_S = 3600.0
"""Margin in seconds beyond the longest grace period: a notice may precede the grace period, and a store has several clocks."""
ORPHAN_AFTER_S = LONGEST_GRACE_S + MARGIN_S
"""Seconds without progress after which an upload is an orphan. The replaced pod may use all of its grace period, which this pod
does not know: ``CKPT_GRACE_SECONDS`` is this pod's own. Parts kept for a day cost storage; parts aborted in the middle of a
flush may cost the newest checkpoint."""
ABANDONED_AFTER_S = 600.0
"""Seconds without progress after which a multipart upload below a committed step is abandoned."""
PROBE_S = 3600.0
"""Seconds without progress after which a start-up probe's upload is an orphan: probes end within seconds."""


def quiet_s(*, listed_at_s: float, begun_at_s: float, parts_stored_at_s: Iterable[float] = ()) -> float | None:
    """Return the seconds since the last progress of an unfinished upload. All times are epoch seconds by the store's clock.

    Args:
        listed_at_s: Time of the listing; 0: unknown.
        begun_at_s: Time of the upload's creation; 0: unknown.
        parts_stored_at_s: Times of its parts; 0: unknown.

    Returns:
        ``None`` where the store gives no times: an upload of unknown age never counts as old.
    """
    arrived_at_s = (begun_at_s, *parts_stored_at_s)
    if listed_at_s <= 0 or min(arrived_at_s) <= 0:
        return None
    return max(0.0, listed_at_s - max(arrived_at_s))


def is_abandoned(*, parts: int, quiet_s: float | None) -> bool:
    """Whether to abort an unfinished upload below a step that this node has just committed.

    It may belong to a pod of a later attempt that sends the same step, so it has to be quiet for a while. An upload without
    parts is one whose creation was not answered; aborted by mistake, it is created again.
    """
    return parts == 0 or (quiet_s is not None and quiet_s > ABANDONED_AFTER_S)


def is_orphan(
    key: str,
    upload_id: str,
    *,
    quiet_s: float | None,
    continued: Collection[str],
    given_up: Collection[str],
    alone: bool,
    newest_committed_step: int | None,
) -> bool:
    """Whether to abort an unfinished upload below the prefix.

    Args:
        key: Relative to the prefix.
        upload_id: Id of the upload.
        quiet_s: Result of ``quiet_s``.
        continued: Ids of the uploads that this node's journals continue.
        given_up: Ids of the uploads that this node abandoned, by its journals.
        alone: This node is the whole job. Otherwise other nodes may be alive, and may pause an upload for longer.
        newest_committed_step: Newest committed step; ``None``: none.

    Uploads outside of checkpoint folders and of the probe's folder belong to other programs, and are left alone.
    """
    if upload_id in continued:
        return False
    if upload_id in given_up:
        return True
    if quiet_s is None:
        return False
    if key.startswith(keys.PROBE):
        return quiet_s > PROBE_S
    name, slash, _ = key.partition("/")
    step = step_of(name)
    if not slash or quiet_s <= ORPHAN_AFTER_S or (step is None and name != FINAL):
        return False
    return alone or (step is not None and newest_committed_step is not None and step < newest_committed_step)
