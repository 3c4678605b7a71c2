"""States of a checkpoint on this node, and their transitions (FORMAT.md, "States")."""

from __future__ import annotations

from enum import StrEnum

from trainer_hook.contract import UNSAVED_STATES


class State(StrEnum):
    """See FORMAT.md."""

    WRITING = "writing"
    """The directory exists without a marker."""
    REJECTED = "rejected"
    """Its marker or one of its files is not valid; the reason is kept."""
    FINISHED = "finished"
    """It has a valid marker and is queued."""
    UPLOADING = "uploading"
    PAUSED = "paused"
    """Preempted by a newer one; the parts sent are kept."""
    UPLOADED = "uploaded"
    """This node's objects and manifest are in the store; other nodes' are incomplete."""
    COMMITTED = "committed"
    """Durable: the step-wide commit is in the store."""
    SUPERSEDED = "superseded"
    """Not sent: a newer one is durable (``CKPT_SUPERSEDED=skip``), a newer attempt owns the step, or its space was needed."""
    LOST = "lost"
    """Its files were deleted before they were sent."""
    GIVEN_UP = "given-up"
    """The deadline passed before it was durable."""


SETTLED = frozenset({State.REJECTED, State.COMMITTED, State.SUPERSEDED, State.LOST, State.GIVEN_UP})
"""Final states."""

PENDING = frozenset({State.FINISHED, State.UPLOADING, State.PAUSED, State.UPLOADED})
"""Finished by the trainer and not durable yet."""

NEVER_DURABLE = SETTLED - {State.COMMITTED}
"""Final states of checkpoints that are not durable."""

UNSAVED = frozenset(map(State, UNSAVED_STATES))
"""Final states of checkpoints that are neither durable nor superseded."""

DISCARDED = NEVER_DURABLE - {State.GIVEN_UP}
"""States in which nothing more is sent, and sent parts are deleted."""

WANTED = PENDING | {State.GIVEN_UP}
"""States in which sent parts are kept: the next sidecar process may still send a checkpoint that was given up."""

REPORTED = frozenset({State.LOST, State.GIVEN_UP})
"""Finished, but never durable: kept for the exit report, also after the directory is deleted."""

_FOLLOWING: dict[State, frozenset[State]] = {
    State.WRITING: frozenset({State.FINISHED, State.REJECTED, State.LOST}),
    State.REJECTED: frozenset({State.FINISHED, State.WRITING}),
    State.FINISHED: frozenset({State.UPLOADING, State.COMMITTED, State.SUPERSEDED, State.REJECTED, State.LOST, State.GIVEN_UP}),
    State.UPLOADING: frozenset(State) - {State.WRITING, State.UPLOADING},
    # A second sidecar of the same pod may have committed it while it was paused here.
    State.PAUSED: frozenset({State.FINISHED, State.UPLOADING, State.COMMITTED, State.SUPERSEDED, State.LOST, State.GIVEN_UP}),
    # Rejected: with the parts of all nodes it is more than a reader takes.
    State.UPLOADED: frozenset(
        {State.FINISHED, State.UPLOADING, State.COMMITTED, State.SUPERSEDED, State.REJECTED, State.LOST, State.GIVEN_UP}
    ),
    State.COMMITTED: frozenset({State.FINISHED}),
    State.SUPERSEDED: frozenset({State.FINISHED}),
    State.LOST: frozenset({State.FINISHED, State.WRITING}),
    State.GIVEN_UP: frozenset(),
}


def may_follow(state: State, following: State) -> bool:
    """Whether a checkpoint in ``state`` may move to ``following``. Staying is always allowed."""
    return state is following or following in _FOLLOWING[state]
