"""The small files below ``.ckpt``: state of the trainer, save request, its answer, termination notice.

Every ``parse`` function but ``parse_notice`` raises ``ContractError``.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer_hook.contract.names import (
    ACTIONS,
    NOTICE_SOURCES,
    OUTCOMES,
    TRAINER_STATES,
    ContractError,
    check_id,
    is_checkpoint_name,
)
from trainer_hook.contract.typed_json import encode_json, integer, json_object, number, one_of, timestamp, typed


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Content of ``trainer.json``. ``updated_at`` is RFC 3339."""

    state: str
    attempt: str | None = None
    step: int | None = None
    world_size: int | None = None
    pid: int | None = None
    updated_at: str | None = None
    total_steps: int | None = None
    """Planned steps, counted as ``step`` is; ``None``: unknown."""
    loss: float | None = None
    """Loss of training as it was logged last; ``None``: unknown."""
    save_error: str | None = None
    """Why the latest save of this node failed; ``None``: it succeeded, or none was tried."""


@dataclass(frozen=True, slots=True)
class RequestFile:
    """Content of ``request.json``: a save that the sidecar requests of the trainer."""

    id: str
    action: str


@dataclass(frozen=True, slots=True)
class AnswerFile:
    """Content of ``answer.json``: the outcome of a request. ``checkpoint`` is ``None`` where nothing was saved."""

    id: str
    outcome: str
    checkpoint: str | None = None
    reason: str | None = None
    at: str | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Content of ``terminating``. An empty file is a notice too: ``at`` and ``source`` are then ``None``."""

    at: str | None = None
    source: str | None = None


def parse_trainer_state(raw: bytes) -> TrainerState:
    """Read ``trainer.json``, which has a known state."""
    fields = json_object(raw, what="trainer.json")
    state = one_of(fields, "state", TRAINER_STATES)
    if state is None:
        raise ContractError("trainer.json has no state")
    attempt = typed(fields, "attempt", str) or None  # "": the trainer ended before it had one
    return TrainerState(
        state=state,
        attempt=None if attempt is None else check_id(attempt, what="attempt"),
        step=integer(fields, "step"),
        world_size=integer(fields, "world_size", least=1),
        pid=integer(fields, "pid"),
        updated_at=timestamp(fields, "updated_at"),
        total_steps=integer(fields, "total_steps"),
        loss=number(fields, "loss"),
        save_error=typed(fields, "save_error", str) or None,
    )


def encode_trainer_state(state: TrainerState) -> bytes:
    """Return the JSON of ``trainer.json``."""
    return encode_json({name: getattr(state, name) for name in TrainerState.__slots__})


def parse_request(raw: bytes) -> RequestFile:
    """Read ``request.json``, which has an id and one of ``ACTIONS``."""
    fields = json_object(raw, what="request.json")
    identifier, action = typed(fields, "id", str), one_of(fields, "action", ACTIONS)
    if not identifier or action is None:
        raise ContractError("request.json needs id and action")
    return RequestFile(identifier, action)


def encode_request(request: RequestFile) -> bytes:
    """Return the JSON of ``request.json``."""
    return encode_json({"id": request.id, "action": request.action})


def parse_answer(raw: bytes) -> AnswerFile:
    """Read ``answer.json``, which has an id, one of ``OUTCOMES`` and, where it was saved, the checkpoint."""
    fields = json_object(raw, what="answer.json")
    identifier, outcome = typed(fields, "id", str), one_of(fields, "outcome", OUTCOMES)
    checkpoint = typed(fields, "checkpoint", str)
    if not identifier or outcome is None or (outcome == "saved" and not (checkpoint and is_checkpoint_name(checkpoint))):
        raise ContractError("answer.json needs id, outcome and, where it was saved, the checkpoint")
    return AnswerFile(identifier, outcome, checkpoint, typed(fields, "reason", str), timestamp(fields, "at"))


def encode_answer(answer: AnswerFile) -> bytes:
    """Return the JSON of ``answer.json``."""
    return encode_json({name: getattr(answer, name) for name in AnswerFile.__slots__})


def parse_notice(raw: bytes) -> Notice:
    """Read ``terminating``. The existence of the file is the notice: unreadable content counts as empty."""
    try:
        fields = json_object(raw, what="terminating")
        return Notice(timestamp(fields, "at"), one_of(fields, "source", NOTICE_SOURCES))
    except ContractError:
        return Notice()


def encode_notice(notice: Notice) -> bytes:
    """Return the JSON of ``terminating``."""
    return encode_json({"at": notice.at, "source": notice.source})
