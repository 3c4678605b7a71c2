"""The kinds of workloads that a person names: how their pods are found, and whether they can be suspended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_RAY_CLUSTER = "ray.io/cluster"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One kind of workload."""

    kind: str
    resource: str
    """As kubectl names it without doubt: ``jobs.batch``."""
    label: str | None = None
    """Label of its pods whose value is its name; ``None``: its own selector finds them."""
    suspend: tuple[str, ...] = ()
    """Path of the field that ends its pods, and lets it go on later; empty: there is none."""


_IN_SPEC = ("spec", "suspend")
_IN_RUN_POLICY = ("spec", "runPolicy", "suspend")
KINDS = (
    # The outermost comes first: a TrainJob makes a JobSet of its name, and that makes Jobs; a RayJob makes a Job of its name,
    # which submits the script and has no sidecar.
    WorkloadKind("TrainJob", "trainjobs.trainer.kubeflow.org", JOBSET_LABEL, _IN_SPEC),
    WorkloadKind("JobSet", "jobsets.jobset.x-k8s.io", JOBSET_LABEL, _IN_SPEC),
    WorkloadKind("RayJob", "rayjobs.ray.io", "ray.io/originated-from-cr-name", _IN_SPEC),
    WorkloadKind("Job", "jobs.batch", "batch.kubernetes.io/job-name", _IN_SPEC),
    WorkloadKind("PyTorchJob", "pytorchjobs.kubeflow.org", "training.kubeflow.org/job-name", _IN_RUN_POLICY),
    WorkloadKind("MPIJob", "mpijobs.kubeflow.org", "training.kubeflow.org/job-name", _IN_RUN_POLICY),
    # One that goes on after spec.suspend is empty: nobody submits the script again.
    WorkloadKind("RayCluster", "rayclusters.ray.io", _RAY_CLUSTER),
    WorkloadKind("LeaderWorkerSet", "leaderworkersets.leaderworkerset.x-k8s.io", "leaderworkerset.sigs.k8s.io/name"),
    WorkloadKind("StatefulSet", "statefulsets.apps"),
    WorkloadKind("Deployment", "deployments.apps"),
    WorkloadKind("Pod", "pods"),
)


def kind_called(text: str) -> WorkloadKind | None:
    """Return the kind that a person calls ``job``, ``jobs``, ``Job`` or ``jobs.batch``; ``None``: none of these."""
    wanted = text.lower()
    return next((kind for kind in KINDS if wanted in (kind.kind.lower(), f"{kind.kind.lower()}s", kind.resource)), None)


def pod_selector(kind: WorkloadKind, workload: Mapping[str, Any]) -> str | None:
    """Return the label selector of a workload's pods; ``None``: it is the pod, or has no selector."""
    if kind.kind == "Pod":
        return None
    # KubeRay labels the cluster of a RayJob with its name, and the pods with the cluster's: each retry has another cluster.
    if kind.kind == "RayJob" and (cluster := (workload.get("status") or {}).get("rayClusterName")):
        return f"{_RAY_CLUSTER}={cluster}"
    if kind.label is not None:
        return f"{kind.label}={(workload.get('metadata') or {}).get('name')}"
    labels = ((workload.get("spec") or {}).get("selector") or {}).get("matchLabels") or {}
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items())) or None


def owner_of(workload: Mapping[str, Any]) -> tuple[WorkloadKind, str] | None:
    """Return kind and name of the workload that controls another one, if that is a known kind."""
    owners = (workload.get("metadata") or {}).get("ownerReferences") or ()
    owner = next((found for found in owners if found.get("controller")), None)
    kind = kind_called(str(owner.get("kind"))) if owner else None
    return (kind, str(owner["name"])) if owner and kind else None


def why_not_suspended(kind: WorkloadKind, workload: Mapping[str, Any]) -> str | None:
    """Return why a workload cannot be suspended by its field, with the next step; ``None``: it can."""
    metadata = workload.get("metadata") or {}
    name = metadata.get("name")
    if not kind.suspend:
        able = ", ".join(known.kind for known in KINDS if known.suspend)
        return f"this command suspends no {kind.kind} ({able}): 'kubectl ckpt save', then delete it"
    if _QUEUE_LABEL in (metadata.get("labels") or {}):
        return (
            f"{kind.kind} {name} is queued by Kueue, which would start it again: 'kubectl ckpt save', then set "
            "spec.active: false on its Workload (kubectl get workloads.kueue.x-k8s.io)"
        )
    if is_suspended(workload):
        return f"{kind.kind} {name} is suspended already"
    spec = workload.get("spec") or {}
    if kind.kind == "RayJob" and (spec.get("clusterSelector") or not spec.get("shutdownAfterJobFinishes")):
        return (
            f"RayJob {name} has clusterSelector, or not shutdownAfterJobFinishes: true: suspended, KubeRay would fail it: "
            "'kubectl ckpt save', then delete it"
        )
    return None


def is_suspended(workload: Mapping[str, Any]) -> bool:
    """Whether a workload of any kind is suspended."""
    spec = workload.get("spec") or {}
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def suspension(kind: WorkloadKind, *, suspends: bool) -> dict[str, Any]:
    """Return the change of a workload that suspends it, or lets it go on, as a merge patch."""
    value: Any = suspends
    for name in reversed(kind.suspend):
        value = {name: value}
    change: dict[str, Any] = value
    return change


def why_no_pods(workload: Mapping[str, Any]) -> str:
    """Return why a workload has no pods now, as a sentence."""
    conditions = (workload.get("status") or {}).get("conditions") or ()
    true = {condition.get("type") for condition in conditions if condition.get("status") == "True"}
    if is_suspended(workload):
        return "The job is suspended: it has no pods"
    if true & {"Complete", "Completed", "Succeeded"}:
        return "The job has completed: its pods are gone"
    return "The job has failed: its pods are gone" if "Failed" in true else "The job has no pods yet"
