"""Answers of the sidecar's API, checked field by field: another program may answer on its port.

Every function raises ``OSError`` for a field of another type. Its text names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_hook.contract import ContractError, SaveIdentity, is_checkpoint_name, parse_identity, step_of
from trainer_hook.contract.typed_json import number, typed


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """Outcome of a resume request. ``checkpoint`` ``None``: there is nothing to resume from, for the reasons in the rest."""

    checkpoint: str | None = None
    source: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    passed_over: tuple[tuple[str, str], ...] = ()
    detail: str | None = None
    known: bool = True
    """False: the outcome is unknown (no store, no space, timeout)."""
    save: SaveIdentity | None = None
    """The writing of the step; ``None``: an older sidecar does not say."""


def required(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an answer that has a field, as each answer of the sidecar to this call does: ``{}`` is another program's."""
    if answer.get(name) is None:
        raise _unlike(f"it has no {name}")
    return answer


def objects(answer: Mapping[str, Any], name: str, *, named_by: str) -> list[dict[str, Any]]:
    """Return a list of objects that each have a text ``named_by``; empty: the field is absent."""
    found = _of_type(answer, name, list) or []
    if not all(isinstance(each, dict) and isinstance(each.get(named_by), str) for each in found):
        raise _unlike(f"{name} must hold objects with {named_by}")
    return found


def missing(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checkpoints that a flush is still missing, at least one."""
    found = objects(answer, "missing", named_by="checkpoint")
    if not found:
        raise _unlike("it has no missing")
    for each in found:
        for name in ("state", "reason"):
            _of_type(each, name, str)
        _check_numbers(each, "sent_bytes", "size_bytes")
    return found


def durable(answer: Mapping[str, Any]) -> list[str]:
    """Return the checkpoints that are durable, by the answer to a flush that is missing none."""
    return texts(required(answer, "durable"), "durable")


def steps_before(answer: Mapping[str, Any], step: int) -> list[int]:
    """Return the lower steps among the checkpoints of an answer, newest first."""
    names = [each["name"] for each in objects(required(answer, "checkpoints"), "checkpoints", named_by="name")]
    return sorted((older for name in names if (older := step_of(name)) is not None and older < step), reverse=True)


def texts(answer: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of texts."""
    found: list[str] | None = _of_type(answer, name, list)
    if found is None or not all(isinstance(each, str) for each in found):
        raise _unlike(f"{name} must hold texts")
    return found


RUNNING = ("idle", "choosing", "downloading")
_STATES = (*RUNNING, "ready", "none", "failed")


def resume_progress(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the progress of a resume as it is."""
    if answer.get("state") not in _STATES:
        raise _unlike(f"a resume is never {str(answer.get('state'))[:60]!r}")
    for name in ("id", "checkpoint", "source", "detail"):
        _of_type(answer, name, str)
    _of_type(answer, "meta", dict)
    objects(answer, "passed_over", named_by="checkpoint")
    _check_numbers(answer, "done_bytes", "total_bytes")
    if answer.get("state") == "ready" and not is_checkpoint_name(answer.get("checkpoint") or ""):
        raise _unlike("it is ready without a checkpoint")
    return answer


def resume_result(progress: Mapping[str, Any]) -> ResumeResult:
    """Return the outcome that a progress says, or its last state when the time is over."""
    passed = tuple((p["checkpoint"], str(p.get("reason"))) for p in progress.get("passed_over") or ())
    state, detail = progress.get("state"), progress.get("detail")
    if state == "ready":
        meta, save = progress.get("meta") or {}, parse_identity(progress.get("save"))
        return ResumeResult(progress["checkpoint"], progress.get("source"), meta, passed, save=save)
    if state == "none":
        return ResumeResult(passed_over=passed, detail=detail)
    return ResumeResult(passed_over=passed, detail=detail or "no answer in time: raise CKPT_RESUME_TIMEOUT_S", known=False)


def progress_text(progress: Mapping[str, Any]) -> str:
    """Return a line about a resume that is under way."""
    if progress.get("detail"):
        return f"waiting for the checkpoint to resume from: {progress['detail']}"
    done, total = progress.get("done_bytes") or 0, progress.get("total_bytes") or 0
    share = f", {100 * done / total:.0f} % of {total / 1e9:.2f} GB" if total else ""
    return f"{progress['state']} {progress.get('checkpoint') or ''}{share}"


def _check_numbers(answer: Mapping[str, Any], *names: str) -> None:
    try:
        for name in names:
            number(answer, name)
    except ContractError as error:
        raise _unlike(str(error)) from None


def _of_type(answer: Mapping[str, Any], name: str, kind: type) -> Any:
    try:
        return typed(answer, name, kind)
    except ContractError as error:
        raise _unlike(str(error)) from None


def _unlike(why: str) -> OSError:
    return OSError(f"not an answer of the sidecar: {why}")
