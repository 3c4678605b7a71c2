"""The outcome of a save that the sidecars of all pods of a job were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_hook.contract import step_of

_WORST_FIRST = ("failed", "asked", "saved", "durable")


@dataclass(frozen=True, slots=True)
class JobSave:
    """The outcome for the whole job."""

    state: str
    """``durable`` only if it is so for every pod; else the worst of ``failed``, ``asked`` and ``saved``."""
    checkpoint: str | None
    """The newest one that the pods named."""
    problems: Mapping[str, str]
    """By pod: why its part is not durable."""

    @property
    def is_durable(self) -> bool:
        """Whether every pod's part is durable."""
        return self.state == "durable"


def job_save(answers: Mapping[str, Mapping[str, Any]]) -> JobSave:
    """Return the outcome for a job.

    ``answers``: by pod, ``state``, ``checkpoint`` and ``detail`` of its save; ``error`` where it could not be asked.
    """
    states = {pod: _state(answer) for pod, answer in answers.items()}
    names = [str(answer["checkpoint"]) for answer in answers.values() if answer.get("checkpoint")]
    problems = {
        pod: str(answers[pod].get("error") or answers[pod].get("detail") or state)
        for pod, state in states.items()
        if state != "durable"
    }
    worst = next((state for state in _WORST_FIRST if state in states.values()), "failed")
    return JobSave(worst, max(names, key=_step, default=None), problems)


def _state(answer: Mapping[str, Any]) -> str:
    state = str(answer.get("state"))
    return state if state in _WORST_FIRST and not answer.get("error") else "failed"


def _step(name: str) -> tuple[float, str]:
    step = step_of(name)
    return (float("inf") if step is None else step), name
