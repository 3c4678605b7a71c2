"""Pods of one job as Kubernetes describes them: whether their sidecars can be asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainer_hook.contract.plain_text import plain_text

SIDECAR = "checkpoint-sidecar"
"""Name of the sidecar's container, as the injection calls it."""
_INDEX = "batch.kubernetes.io/job-completion-index"
_GROUPS = ("batch.kubernetes.io/job-name", "leaderworkerset.sigs.k8s.io/group-index")
"""Labels that name the group in which an index is unique: the Job of a JobSet, the group of a LeaderWorkerSet."""
_OTHER_INDICES = ("apps.kubernetes.io/pod-index", "leaderworkerset.sigs.k8s.io/worker-index")


class PodState(StrEnum):
    """What a pod's sidecar does."""

    RUNNING = "running"
    WAITING = "waiting"
    """It has not started yet."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class JobPod:
    """One pod with a sidecar."""

    name: str
    state: PodState
    index: int | None = None
    """Among the pods of its Job; ``None``: not numbered."""
    created_at: str = ""
    """RFC 3339, which sorts by time."""
    detail: str | None = None
    """Why it waits, or how it ended."""
    directory: str = "/checkpoints"
    """The shared volume, as the sidecar sees it."""
    group: str = ""
    """The group in which its index is unique, such as the Job of a JobSet; empty: all pods."""

    @property
    def place(self) -> tuple[str, int] | None:
        """What a later pod takes over; ``None``: it is not numbered."""
        return None if self.index is None else (self.group, self.index)


def job_pods(items: Iterable[Mapping[str, Any]]) -> list[JobPod]:
    """Return the pods that have a sidecar, by index and name.

    Pods that ended count only where no later pod does their work: one of the same index, or any if they have no index.
    """
    found = [pod for item in items if (pod := _job_pod(item)) is not None]
    alive = [pod for pod in found if pod.state is not PodState.ENDED]
    taken = {pod.place for pod in alive}
    newest: dict[object, JobPod] = {}
    for pod in sorted((pod for pod in found if pod.state is PodState.ENDED), key=_by_age):
        newest[pod.place or pod.name] = pod
    ended = [pod for pod in newest.values() if pod.place not in taken and not (alive and pod.place is None)]
    return sorted([*alive, *ended], key=_by_index)


def _by_age(pod: JobPod) -> tuple[str, str]:
    return pod.created_at, pod.name


def _by_index(pod: JobPod) -> tuple[bool, int, str]:
    return pod.index is None, pod.index or 0, pod.name


def _metadata(item: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = item.get("metadata") or {}
    return found


def _job_pod(item: Mapping[str, Any]) -> JobPod | None:
    spec, status, metadata = item.get("spec") or {}, item.get("status") or {}, _metadata(item)
    container = _named([*(spec.get("initContainers") or ()), *(spec.get("containers") or ())])
    if container is None:
        return None
    current = _named([*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]) or {}
    state, detail = _state(status, current.get("state") or {})
    env = {entry.get("name"): entry.get("value") for entry in container.get("env") or ()}
    labels = metadata.get("labels") or {}
    return JobPod(
        str(metadata.get("name")),
        state,
        _index(metadata),
        str(metadata.get("creationTimestamp") or ""),
        plain_text(detail) if detail else None,
        str(env.get("CKPT_DIR") or "/checkpoints"),
        next((str(labels[name]) for name in _GROUPS if name in labels), ""),
    )


def _named(containers: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((container for container in containers if container.get("name") == SIDECAR), None)


def _state(status: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[PodState, str | None]:
    phase = status.get("phase")
    if ended := current.get("terminated"):
        message = str(ended.get("message") or "").strip()
        return PodState.ENDED, message or f"exit code {ended.get('exitCode')}, {ended.get('reason') or 'no reason'}"
    if phase in ("Succeeded", "Failed"):
        return PodState.ENDED, str(status.get("message") or status.get("reason") or phase)
    if "running" in current:
        return PodState.RUNNING, None
    waiting = current.get("waiting") or {}
    conditions = {found.get("type"): found for found in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        return PodState.WAITING, str(scheduled.get("message") or scheduled.get("reason") or "not scheduled")
    return PodState.WAITING, str(waiting.get("message") or waiting.get("reason") or phase or "not started")


def _index(metadata: Mapping[str, Any]) -> int | None:
    said = (metadata.get("annotations") or {}).get(_INDEX)
    labels = metadata.get("labels") or {}
    found = next((labels[name] for name in (_INDEX, *_OTHER_INDICES) if name in labels), said)
    return int(found) if found is not None and str(found).isascii() and str(found).isdigit() else None
