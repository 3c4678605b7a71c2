"""One answer for a whole job, from what the sidecar of each pod says.

A commit names the manifests of all nodes, so what one sidecar knows to be durable is durable for the job. What is at risk, and
whether a save fits the grace period, is decided by the worst pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sidecar.core.job.pods import JobPod, PodState
from sidecar.core.lifecycle.safety import Level, cost_text
from sidecar.core.lifecycle.termination_sentence import ending_of

_SEVERITY = (Level.SAFE, Level.UNKNOWN, Level.ATTENTION, Level.DANGER)


class Answered(StrEnum):
    """Whether a pod's sidecar has said how it is."""

    YES = "answers"
    SILENT = "silent"
    """It runs and does not answer."""
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PodReport:
    """What is known of one pod at one instant. ``None``: not known."""

    pod: str
    state: Answered
    detail: str | None = None
    """Why there is no answer, or how the pod ended."""
    level: Level = Level.UNKNOWN
    headline: str | None = None
    phase: str | None = None
    node_index: int | None = None
    node_count: int | None = None
    trained_step: int | None = None
    durable_step: int | None = None
    finished_step: int | None = None
    steps_at_risk: int | None = None
    seconds_at_risk: float | None = None
    fits_grace: bool | None = None
    sigterm: str | None = None
    """What is lost at SIGTERM, as a line says it."""
    sent_bytes: int = 0
    """Of the checkpoints that are not durable yet."""
    pending_bytes: int = 0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Status of a job. ``None``: not known."""

    level: Level
    headline: str
    reasons: tuple[str, ...]
    """What else needs attention, most important first."""
    pods_wanted: int
    pods_answering: int
    trained_step: int | None
    durable_step: int | None
    """Newest step that is durable for all nodes."""
    finished_step: int | None
    """Newest step that every node has finished writing; ``None`` unless all of them answer."""
    steps_at_risk: int | None
    seconds_at_risk: float | None
    fits_grace: bool | None
    sigterm: str | None
    """What is lost at SIGTERM, by the pod that would lose most."""
    sent_bytes: int
    pending_bytes: int
    pods: tuple[PodReport, ...]


def pod_report(pod: JobPod, answer: Mapping[str, Any] | None, error: str | None = None) -> PodReport:
    """Return what one sidecar says.

    ``answer``: its ``/v1/status``, also of another version; ``None``: it was not asked, or did not answer, because of
    ``error``.
    """
    if pod.state is PodState.ENDED:
        return _ended(pod)
    if answer is None:
        state = Answered.WAITING if pod.state is PodState.WAITING else Answered.SILENT
        return PodReport(pod.name, state, error or pod.detail, node_index=pod.index)
    risk, safety, queue = answer.get("at_risk") or {}, answer.get("safety") or {}, answer.get("queue") or []
    sigterm = safety.get("sigterm") or {}
    known = {level.value for level in Level}
    index = answer.get("node_index")
    return PodReport(
        pod.name,
        Answered.YES,
        level=Level(safety["level"]) if safety.get("level") in known else Level.UNKNOWN,
        headline=safety.get("headline") or answer.get("degraded_reason"),
        phase=answer.get("phase"),
        node_index=pod.index if index is None else index,
        node_count=answer.get("node_count"),
        trained_step=(answer.get("trainer") or {}).get("step"),
        durable_step=answer.get("newest_durable_step"),
        finished_step=answer.get("newest_finished_step"),
        steps_at_risk=risk.get("steps_at_risk"),
        seconds_at_risk=risk.get("seconds_at_risk"),
        fits_grace=risk.get("fits_grace"),
        sigterm=cost_text(sigterm["lost"], sigterm.get("why") or "") if sigterm.get("lost") else None,
        sent_bytes=sum(each.get("sent_bytes") or 0 for each in queue),
        pending_bytes=sum(each.get("size_bytes") or 0 for each in queue),
    )


def _ended(pod: JobPod) -> PodReport:
    ending = ending_of(pod.detail or "")
    level = Level.SAFE if ending.all_durable else Level.UNKNOWN
    return PodReport(pod.name, Answered.ENDED, pod.detail, level, node_index=pod.index, durable_step=ending.durable_step)


def job_status(reports: Iterable[PodReport], *, without_pods: str = "No pod of the job has a sidecar") -> JobStatus:
    """Return the status of a job. ``without_pods``: what to say if there is no report."""
    pods = tuple(sorted(reports, key=_order))
    answering = [pod for pod in pods if pod.state is Answered.YES]
    wanted = max([len(pods), *(pod.node_count or 0 for pod in answering)])
    found = sorted(_findings(pods, wanted) if pods else [(Level.UNKNOWN, without_pods)], key=_most_severe_first)
    level, headline = found[0]
    all_answer = len(answering) == wanted and bool(pods)
    fits = [pod.fits_grace for pod in answering]
    worst = min((pod for pod in answering if pod.sigterm), key=_worst_first, default=None)
    finished = [pod.finished_step for pod in answering]
    return JobStatus(
        level=level,
        headline=headline,
        reasons=tuple(text for severity, text in found[1:] if severity is not Level.SAFE or not answering),
        pods_wanted=wanted,
        pods_answering=len(answering),
        trained_step=_largest(pod.trained_step for pod in answering),
        durable_step=_largest(pod.durable_step for pod in pods),
        finished_step=min((step for step in finished if step is not None), default=None)
        if all_answer and None not in finished
        else None,
        steps_at_risk=_largest(pod.steps_at_risk for pod in answering),
        seconds_at_risk=_largest(pod.seconds_at_risk for pod in answering),
        fits_grace=False if False in fits else True if all_answer and None not in fits else None,
        sigterm=worst.sigterm if worst else None,
        sent_bytes=sum(pod.sent_bytes for pod in answering),
        pending_bytes=sum(pod.pending_bytes for pod in answering),
        pods=pods,
    )


def _order(pod: PodReport) -> tuple[bool, int, str]:
    return pod.node_index is None, pod.node_index or 0, pod.pod


def _worst_first(pod: PodReport) -> tuple[int, int]:
    return (False, None, True).index(pod.fits_grace), -(pod.steps_at_risk or 0)


def _largest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)


def _most_severe_first(finding: tuple[Level, str]) -> tuple[int, str]:
    return -_SEVERITY.index(finding[0]), finding[1]


def _findings(pods: Sequence[PodReport], wanted: int) -> Iterator[tuple[Level, str]]:
    said: dict[tuple[Level, str], list[str]] = {}
    for pod in pods:
        if pod.state is Answered.YES:
            said.setdefault((pod.level, pod.headline or "The sidecar does not say how safe training is"), []).append(pod.pod)
        elif pod.state is Answered.SILENT:
            yield Level.ATTENTION, f"The sidecar of {pod.pod} does not answer: {pod.detail or 'no reason given'}"
        elif pod.state is Answered.WAITING:
            yield Level.UNKNOWN, f"{pod.pod} has not started: {pod.detail or 'no reason given'}"
        else:
            yield pod.level, f"{pod.pod} has ended: {pod.detail or 'no reason given'}"
    for (level, headline), names in said.items():
        yield level, headline if len(names) == wanted else f"{', '.join(names)}: {headline}"
    if wanted > len(pods):
        yield Level.UNKNOWN, f"{wanted - len(pods)} of {wanted} pods are not there"
