"""The run that a pod belongs to: ``{name}`` in a store, and the variables for the sidecar's namespace and job.

Two workloads must never share a prefix, also those of two namespaces and those made from one template. Names that only the
cluster knows stay variables, ``$(POD_NAMESPACE)`` or ``$(JOB_NAME)``, which Kubernetes expands if they are defined in front of
``CKPT_STORE``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidecar.kubernetes.inject.fields import Fields, at, labels_of, metadata_of
from sidecar.kubernetes.inject.options import ANY_BUCKET
from sidecar.kubernetes.inject.pod_templates import Kind, PodTemplate
from sidecar.kubernetes.inject.reports import NotInjectable
from sidecar.store_url import shown, store_place

NAMESPACE, JOB, JOBSET = "$(POD_NAMESPACE)", "$(JOB_NAME)", "$(JOBSET_NAME)"
RUN_NAMES = ("JOB_NAME", "JOBSET_NAME")
"""Variables of the sidecar that name its run."""
VARIABLE = re.compile(r"\$\([A-Za-z_][A-Za-z0-9_]*\)")
"""A variable that Kubernetes expands when the container starts."""

JOB_LABEL = "batch.kubernetes.io/job-name"
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_KUBEFLOW_LABEL = "training.kubeflow.org/job-name"
_RAY_CLUSTER = "ray.io/cluster"
RAY_ORIGIN = "ray.io/originated-from-cr-name"
_VOLCANO_LABEL = "volcano.sh/job-name"
_LWS_NAME, _LWS_GROUP = "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index"
_POD_GROUP = "kueue.x-k8s.io/pod-group-name"
_RELEASE = "app.kubernetes.io/instance"
_MADE_BY_RAY = re.compile(r".+-[bcdfghjklmnpqrstvwxz2456789]{5}")
"""A name with a suffix of Kubernetes' own alphabet, as KubeRay gives it to the cluster of a RayJob: each retry has another."""


def name_in_store(document: Fields, kind: Kind | None) -> str | None:
    """Return the text for ``{name}``; ``None``: nothing names the run.

    The workload's name; where several runs are made from one document, a variable.

    ``kind``: ``None``: a TrainJob.
    """
    metadata = metadata_of(document)
    if kind is not None and (variable := _of_several_runs(document, kind)):
        return variable
    if metadata.get("name"):
        return str(metadata["name"])
    if metadata.get("generateName"):
        prefix = str(metadata["generateName"]).rstrip("-")
        return (JOBSET if kind is None else _variable_of(kind)) or prefix
    return None


def _of_several_runs(document: Fields, kind: Kind) -> str | None:
    """Return the variable that names each run, where a document makes several."""
    if kind.group == "trainer.kubeflow.org":
        return JOBSET  # a runtime has as many runs as TrainJobs
    if kind.name in ("CronJob", "RayCronJob"):
        return JOB
    if kind.name == "LeaderWorkerSet" and has_groups(document):
        return JOB
    return None


def names_each_run(store: str) -> bool:
    """Whether a store has a variable that differs between runs."""
    return JOB in store or JOBSET in store


def has_groups(document: Fields) -> bool:
    """Whether a LeaderWorkerSet has several groups, each of which is a run."""
    replicas = (document.get("spec") or {}).get("replicas")
    return isinstance(replicas, int) and replicas > 1


def _variable_of(kind: Kind) -> str | None:
    if kind.has_replicated_jobs:
        return JOBSET
    return JOB if _label_of(kind) or kind.name == "LeaderWorkerSet" else None


def _label_of(kind: Kind) -> str | None:
    """Return the pods' label with the name of their workload."""
    if kind.group == "kubeflow.org":
        return _KUBEFLOW_LABEL
    labels = {"batch": JOB_LABEL, "batch.volcano.sh": _VOLCANO_LABEL}
    if kind.name in ("RayCluster", "RayCronJob"):
        return _RAY_CLUSTER
    return labels.get(kind.group)


def run_variables(document: Fields, kind: Kind, store: str, *, is_alone: bool, has_old_labels: bool = False) -> dict[str, Any]:
    """Return the variables that name a pod's run, in the order in which they refer to each other.

    Args:
        document: The workload.
        kind: Its kind.
        store: Where its checkpoints go; a prefix that all runs of a schedule share is the schedule's, not one run's.
        is_alone: Whether the pod is not one of several that make a run; a bare Pod's own name would part them.
        has_old_labels: Whether the cluster is older than 1.27, where the label of a Job's name had no prefix.
    """
    namespace = {"POD_NAMESPACE": _field("metadata.namespace")}
    metadata = metadata_of(document)
    if kind.has_replicated_jobs:
        return namespace | _jobset_variables()
    if kind.name == "LeaderWorkerSet":
        return namespace | _group_variables()
    if kind.name == "Pod":
        return namespace | _pod_variables(metadata, is_alone=is_alone)
    label = _label_of(kind)
    if label is None or (kind.name in ("CronJob", "RayCronJob") and JOB not in store):
        name = metadata.get("name")
        return namespace | ({"JOB_NAME": f"{kind.name.lower()}/{name}"} if name else {})
    return namespace | {"JOB_NAME": _label("job-name" if label == JOB_LABEL and has_old_labels else label)}


def referred_to(store: str) -> dict[str, Any]:
    """Return the variables of a TrainJob's store, whose other variables its runtime has."""
    known = {NAMESPACE: ("POD_NAMESPACE", _field("metadata.namespace")), JOBSET: ("JOBSET_NAME", _label(_JOBSET_LABEL))}
    return dict(value for variable, value in known.items() if variable in store)


def check_store(store: str, document: Fields, *, volume: Path | None = None) -> None:
    """Hold a store against the rule for stores, with names in the place of its variables.

    ``volume``: directory of the shared volume, which must not contain it.

    Raises:
        NotInjectable: It is no store.
    """
    namespace = str(metadata_of(document).get("namespace") or "namespace")
    filled = VARIABLE.sub("name", store.replace(NAMESPACE, namespace))
    try:
        store_place(filled, bucket=ANY_BUCKET, volume=volume)
    except ValueError as error:
        raise NotInjectable("", f"--store {shown(filled)} {error}") from None


def _field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


def _label(name: str) -> dict[str, Any]:
    return _field(f"metadata.labels['{name}']")


def _jobset_variables() -> dict[str, Any]:
    # By UID and attempt the sidecar tells pods of an earlier restart from those of this one.
    return {
        "JOBSET_NAME": _label(_JOBSET_LABEL),
        "JOBSET_UID": _label("jobset.sigs.k8s.io/jobset-uid"),
        "JOBSET_RESTART_ATTEMPT": _field("metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"),
    }


def _group_variables() -> dict[str, Any]:
    return {"LWS_NAME": _label(_LWS_NAME), "LWS_GROUP": _label(_LWS_GROUP), "JOB_NAME": "$(LWS_NAME)-$(LWS_GROUP)"}


def _pod_variables(metadata: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """Return the variables of a pod by its labels and owners; its own name where no controller made it."""
    labels = metadata.get("labels") or {}
    if labels.get(_JOBSET_LABEL):
        return _jobset_variables()
    if labels.get(_LWS_NAME):
        return _group_variables()
    if labels.get(RAY_ORIGIN):
        origin = str(labels.get("ray.io/originated-from-crd") or "RayJob").lower()
        return {"JOB_NAME": f"{origin}/{labels[RAY_ORIGIN]}"}
    if _RAY_CLUSTER in labels and _MADE_BY_RAY.fullmatch(str(labels[_RAY_CLUSTER])):
        return {}
    for label in (_KUBEFLOW_LABEL, _RAY_CLUSTER, JOB_LABEL, "job-name", _VOLCANO_LABEL, _POD_GROUP):
        if labels.get(label):
            return {"JOB_NAME": _label(label)}
    owner = owner_of_pod(metadata)
    if owner is not None:
        return {"JOB_NAME": "/".join(owner)}
    return {"JOB_NAME": f"pod/{metadata['name']}"} if is_alone and metadata.get("name") else {}


def is_of_mpi(template: PodTemplate) -> bool:
    """Whether ``mpirun`` starts the ranks."""
    return template.kind.name == "MPIJob" or at(template.document, "spec.mlPolicy.mpi") is not None


def ends_training_at_sigterm(template: PodTemplate) -> bool:
    """Whether the container's own process, ``ray start`` or ``sshd``, ends at SIGTERM, and the training with it."""
    return template.kind.group == "ray.io" or _RAY_CLUSTER in labels_of(template.fields) or is_of_mpi(template)


def is_of_workload(metadata: Mapping[str, Any]) -> bool:
    """Whether a controller has made a pod, or a label of it names its workload."""
    return owner_of_pod(metadata) is not None or bool(_pod_variables(metadata, is_alone=False))


def name_of_pods_run(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of the run that a pod which is being created belongs to; ``None`` where nothing names it.

    A pod's own name changes whenever a controller makes it again, so the workload's goes first, the outermost before others.

    Raises:
        NotInjectable: It is of a Ray cluster whose name changes with each retry of its RayJob.
    """
    labels = metadata.get("labels") or {}
    for label in (_JOBSET_LABEL, _KUBEFLOW_LABEL, RAY_ORIGIN):
        if labels.get(label):
            return str(labels[label])
    if cluster := labels.get(_RAY_CLUSTER):
        if _MADE_BY_RAY.fullmatch(str(cluster)):
            text = (
                f"{_RAY_CLUSTER}={cluster} looks like the cluster of a RayJob, whose retry has another name and would not "
                f"resume: give the worker group's template the label {RAY_ORIGIN} with the RayJob's name, or the annotation "
                "checkpoint-sidecar/store with a prefix of its own"
            )
            raise NotInjectable("metadata.labels", text)
        return str(cluster)
    if labels.get(_LWS_NAME):
        group = str(labels.get(_LWS_GROUP) or "0")
        return str(labels[_LWS_NAME]) + (f"-{group}" if group != "0" else "")
    for label in (JOB_LABEL, "job-name", _VOLCANO_LABEL, _POD_GROUP):
        if labels.get(label):
            return str(labels[label])
    owner = owner_of_pod(metadata)
    return owner[1] if owner else metadata.get("name") or labels.get(_RELEASE)


def owner_of_pod(metadata: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and name of what made a pod; of a Deployment's ReplicaSet, which changes with each rollout, the former."""
    owner = next((owner for owner in metadata.get("ownerReferences") or () if owner.get("controller")), None)
    if owner is None or not owner.get("name"):
        return None
    kind, name = str(owner.get("kind") or "").lower(), str(owner["name"])
    template_hash = (metadata.get("labels") or {}).get("pod-template-hash")
    if kind == "replicaset" and template_hash and name.endswith(f"-{template_hash}"):
        return "deployment", name.removesuffix(f"-{template_hash}")
    return kind, name
