"""Finds a job and its pods, and asks all of its sidecars at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sidecar.core.job.pods import JobPod, PodState, job_pods
from sidecar.core.job.status import JobStatus, PodReport, job_status, pod_report
from sidecar.core.job.workloads import KINDS, WorkloadKind, kind_called, owner_of, pod_selector, why_no_pods
from sidecar.errors import ConfigurationError, NothingFound, SidecarError
from sidecar.kubectl.cluster import ClusterUnreachable, Kubectl, UnknownKind

ASK_S = 20.0
"""How long one sidecar may take to answer, in seconds."""
AT_ONCE = 32
"""Sidecars that are asked at the same time: each is a process on this machine."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A workload and its pods, as they were found."""

    kind: WorkloadKind
    name: str
    workload: dict[str, Any]
    pod_objects: tuple[dict[str, Any], ...]

    @property
    def pods(self) -> list[JobPod]:
        """The pods that have a sidecar."""
        return job_pods(self.pod_objects)

    @property
    def title(self) -> str:
        """Such as ``Job run``."""
        return f"{self.kind.kind} {self.name}"


def find(cluster: Kubectl, given: str) -> Job:
    """Return the job that a person named, the outermost of its name. ``given``: ``NAME`` or ``KIND/NAME``.

    Raises:
        ConfigurationError: The kind is not known.
        NothingFound: There is no such object.
        SidecarError: kubectl failed.
    """
    kind_text, slash, name = given.rpartition("/")
    kinds: Sequence[WorkloadKind] = KINDS
    if slash:
        kind = kind_called(kind_text)
        if kind is None:
            known = ", ".join(found.kind.lower() for found in KINDS)
            raise ConfigurationError(f"{given}: {kind_text!r} is not one of {known}")
        kinds = [kind]
    if not name or name.startswith("-"):
        raise ConfigurationError(f"{given!r} names no job: NAME or KIND/NAME, such as job/train")
    with ThreadPoolExecutor(len(kinds)) as threads:
        found = list(threads.map(partial(_look, cluster, name), kinds))
    for kind, workload in zip(kinds, found, strict=True):
        if isinstance(workload, dict):
            return Job(kind, name, workload, tuple(_pods(cluster, kind, workload)))
    if refused := [error for error in found if isinstance(error, SidecarError) and not isinstance(error, UnknownKind)]:
        raise next((error for error in refused if not isinstance(error, ConfigurationError)), refused[0])
    where = f"namespace {cluster.namespace}" if cluster.namespace else "the current namespace"
    raise NothingFound(f"no job called {given!r} in {where}: 'kubectl get jobs' lists them; -n selects another namespace")


def _look(cluster: Kubectl, name: str, kind: WorkloadKind) -> dict[str, Any] | SidecarError | None:
    try:
        if not cluster.run("get", kind.resource, name, "--ignore-not-found", "-o", "name").strip():
            return None
        return cluster.get(kind.resource, name)
    except SidecarError as error:
        return error


def _pods(cluster: Kubectl, kind: WorkloadKind, workload: dict[str, Any]) -> list[dict[str, Any]]:
    if kind.kind == "Pod":
        return [workload]
    selector = pod_selector(kind, workload)
    if selector is None:
        raise NothingFound(
            f"{kind.kind} {workload['metadata']['name']} has no label selector for its pods: name a pod, pod/NAME"
        )
    items: list[dict[str, Any]] = cluster.get("pods", "-l", selector)["items"]
    return items


def outermost(cluster: Kubectl, job: Job) -> Job:
    """Return the workload that owns this one, at the top: a Job of a JobSet is suspended with it."""
    while (owner := owner_of(job.workload)) is not None:
        kind, name = owner
        job = Job(kind, name, cluster.get(kind.resource, name), job.pod_objects)
    return job


def at_once(work: Callable[[JobPod], T], pods: Sequence[JobPod], *, most: int = AT_ONCE) -> list[T]:
    """Call ``work`` for each pod, at most ``most`` at the same time, and return the results in the order of the pods."""
    with ThreadPoolExecutor(max(1, min(most, len(pods)))) as threads:
        return list(threads.map(work, pods))


def status_of(cluster: Kubectl, job: Job) -> JobStatus:
    """Return the status of the job now.

    Raises:
        NothingFound: None of its pods has a sidecar.
    """
    if job.pod_objects and not job.pods:
        raise NothingFound(
            f"no pod of {job.title} has a container checkpoint-sidecar: 'checkpoint-sidecar inject' puts it into the manifest, "
            "the webhook into labelled pods"
        )
    reports = at_once(partial(_report, cluster), job.pods)
    return job_status(reports, without_pods=why_no_pods(job.workload))


def _report(cluster: Kubectl, pod: JobPod) -> PodReport:
    if pod.state is not PodState.RUNNING:
        return pod_report(pod, None)
    try:
        done = cluster.ask(pod.name, "status", "--json", timeout_s=ASK_S)
    except ClusterUnreachable as error:
        return pod_report(pod, None, str(error))
    answer = done.answer()
    if done.code or answer is None:
        return pod_report(pod, None, done.problem())
    return pod_report(pod, answer)


def running(pods: Iterable[JobPod]) -> list[JobPod]:
    """Return the pods whose sidecars can be asked."""
    return [pod for pod in pods if pod.state is PodState.RUNNING]


def wait_until_gone(cluster: Kubectl, job: Job, *, timeout_s: float) -> list[str]:
    """Wait until the job's pods have ended. Returns the names of those that have not, within the time."""
    names = {pod.name for pod in job.pods}
    until_s = time.monotonic() + timeout_s
    while True:
        left = [pod.name for pod in job_pods(_pods(cluster, job.kind, job.workload)) if pod.state is not PodState.ENDED]
        left = [name for name in left if name in names]
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(1)
