"""``progress`` and ``wait``: how durable a TrainJob is, from a notebook."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from checkpoint_sidecar import _cluster
from sidecar.core.job.pods import JobPod, PodState, job_pods
from sidecar.core.job.status import JobStatus, PodReport, job_status, pod_report
from sidecar.core.job.workloads import JOBSET_LABEL, why_no_pods
from sidecar.errors import NothingFound, SidecarError

ASK_S = 20.0
"""How long one sidecar may take to answer, in seconds."""
_GROUP = ("trainer.kubeflow.org", "v1alpha1")


class TrainingFailed(SidecarError):
    """The TrainJob has failed; ``progress`` is what is durable of it."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(f"TrainJob {progress.job} has failed; {progress.durable_text}: client.get_job_logs says why")
        self.progress = progress


class NotDurable(SidecarError):
    """No pod of the TrainJob has a sidecar."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A TrainJob at one instant. ``print`` shows it."""

    job: str
    state: str
    """``Created``, ``Running``, ``Suspended``, ``Complete`` or ``Failed``."""
    status: JobStatus
    """The checkpoints, over all pods."""

    @property
    def step(self) -> int | None:
        """The step that the trainer has done; ``None``: not known."""
        return self.status.trained_step

    @property
    def durable_step(self) -> int | None:
        """The newest step that a new pod would resume from; ``None``: none, or not known now."""
        return self.status.durable_step

    @property
    def durable_text(self) -> str:
        """How far it is durable, in words."""
        return "nothing is known to be durable" if self.durable_step is None else f"step {self.durable_step} is durable"

    def __str__(self) -> str:
        status = self.status
        risk = "" if status.steps_at_risk is None else f", {status.steps_at_risk} steps at risk"
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"{self.job}: {self.state}{step}; {self.durable_text}{risk}", f"{status.level}: {status.headline}"]
        return "\n".join([*lines, *(f"also: {reason}" for reason in status.reasons)])


def progress(job: str, client: Any = None) -> Progress:
    """Return how far a TrainJob is, and how much of it is durable.

    Args:
        job: Its name, as ``TrainerClient.train`` returns it.
        client: The ``TrainerClient``; ``None``: a new one.

    Raises:
        NothingFound: There is no such TrainJob.
        NotDurable: It has pods, and none of them has a sidecar.
    """
    backend = _backend(client)
    found = _train_job(backend, job)
    state = _state(found)
    items = _pods(backend, job)
    pods = job_pods(items)
    if items and not pods and state == "Running":
        raise NotDurable(
            f"no pod of TrainJob {job} has a sidecar: was it trained with options=[durable(…)], and is there a webhook, or a "
            "runtime with the sidecar?"
        )
    with ThreadPoolExecutor(max(1, min(16, len(pods)))) as threads:
        reports = list(threads.map(partial(_report, backend), pods))
    return Progress(job, state, job_status(reports, without_pods=why_no_pods(found)))


def wait(
    job: str,
    client: Any = None,
    *,
    timeout_s: float | None = None,
    every_s: float = 10.0,
    on_progress: Callable[[Progress], Any] | None = print,
) -> Progress:
    """Wait until a TrainJob has completed.

    Args:
        job: Its name.
        client: The ``TrainerClient``; ``None``: a new one.
        timeout_s: ``None``: without end.
        every_s: Interval of the looks at it, in seconds.
        on_progress: Called whenever its state, its durable step or its safety has changed; ``None``: nothing is.

    Returns:
        The last progress. The pods' ends count as far as they are still there.

    Raises:
        TrainingFailed: It has failed.
        TimeoutError: It has not ended in time; it goes on.
        NothingFound, NotDurable: As ``progress``.
    """
    client = client or _new_client()
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    said: tuple[object, ...] = ()
    while True:
        now = progress(job, client)
        shown = (now.state, now.durable_step, now.status.level)
        if on_progress is not None and shown != said:
            said = shown
            on_progress(now)
        if now.state == "Complete":
            return now
        if now.state == "Failed":
            raise TrainingFailed(now)
        if until_s is not None and time.monotonic() > until_s:
            raise TimeoutError(f"TrainJob {job} is {now.state} after {timeout_s:g} s; {now.durable_text}; it goes on")
        time.sleep(every_s)


def _report(backend: Any, pod: JobPod) -> PodReport:
    if pod.state is not PodState.RUNNING:
        return pod_report(pod, None)
    return pod_report(pod, *_cluster.exec_json(backend, pod.name, "status", "--json", timeout_s=ASK_S))


def _new_client() -> Any:
    try:
        from kubeflow.trainer import TrainerClient
    except ModuleNotFoundError:
        raise SidecarError("the package kubeflow is missing: pip install 'checkpoint-sidecar[kubeflow]'") from None
    return TrainerClient()


def _backend(client: Any) -> Any:
    backend = (client or _new_client()).backend
    if not _cluster.is_kubernetes(backend):
        raise SidecarError(
            f"progress needs a cluster, not {type(backend).__name__}: 'checkpoint-sidecar status' says it elsewhere"
        )
    return backend


def _train_job(backend: Any, job: str) -> dict[str, Any]:
    from kubernetes.client import ApiException

    try:
        found: dict[str, Any] = backend.custom_api.get_namespaced_custom_object(*_GROUP, backend.namespace, "trainjobs", job)
    except ApiException as error:
        if error.status != 404:
            raise
        raise NothingFound(f"no TrainJob {job!r} in namespace {backend.namespace}: client.list_jobs() lists them") from None
    return found


def _state(found: dict[str, Any]) -> str:
    conditions = (found.get("status") or {}).get("conditions") or ()
    true = {condition["type"] for condition in conditions if condition.get("status") == "True"}
    ended = next((state for state in ("Complete", "Failed", "Suspended") if state in true), None)
    active = any(job.get("active") for job in (found.get("status") or {}).get("jobsStatus") or ())
    return ended or ("Running" if active else "Created")


def _pods(backend: Any, job: str) -> list[dict[str, Any]]:
    found = backend.core_api.list_namespaced_pod(backend.namespace, label_selector=f"{JOBSET_LABEL}={job}")
    plain: dict[str, Any] = backend.core_api.api_client.sanitize_for_serialization(found)
    items: list[dict[str, Any]] = plain["items"]
    return items
