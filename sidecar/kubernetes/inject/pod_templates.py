"""The kinds of workloads, and the pod templates of a document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from sidecar.kubernetes.inject.fields import Fields, at
from sidecar.kubernetes.inject.options import LABEL
from sidecar.kubernetes.inject.reports import NotInjectable

BY_WEBHOOK = f"get the sidecar from the webhook, by the label {LABEL}"
"""What works for pods of any kind of workload."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of workload. ``pods``: paths to its pod templates; ``[]`` is every entry of a list, ``{}`` of a mapping."""

    group: str
    name: str
    pods: tuple[str, ...]
    trainer: str | None = None
    """Name of the trainer's container by convention; pods without it get no sidecar."""

    @property
    def is_job(self) -> bool:
        """Whether batch Jobs make the pods."""
        return self.group == "batch" or self.has_replicated_jobs

    @property
    def has_replicated_jobs(self) -> bool:
        """Whether it is a JobSet or a template of one."""
        return self.group in ("jobset.x-k8s.io", "trainer.kubeflow.org")


_JOBSET = "replicatedJobs[].template.spec.template"
KINDS = (
    Kind("", "Pod", ("",)),
    Kind("", "PodTemplate", ("template",)),
    Kind("batch", "Job", ("spec.template",)),
    Kind("batch", "CronJob", ("spec.jobTemplate.spec.template",)),
    Kind("apps", "Deployment", ("spec.template",)),
    Kind("apps", "StatefulSet", ("spec.template",)),
    Kind("apps", "ReplicaSet", ("spec.template",)),
    Kind("jobset.x-k8s.io", "JobSet", (f"spec.{_JOBSET}",)),
    Kind("trainer.kubeflow.org", "TrainingRuntime", (f"spec.template.spec.{_JOBSET}",), "node"),
    Kind("trainer.kubeflow.org", "ClusterTrainingRuntime", (f"spec.template.spec.{_JOBSET}",), "node"),
    Kind("kubeflow.org", "PyTorchJob", ("spec.pytorchReplicaSpecs{}.template",), "pytorch"),
    Kind("kubeflow.org", "TFJob", ("spec.tfReplicaSpecs{}.template",), "tensorflow"),
    Kind("kubeflow.org", "JAXJob", ("spec.jaxReplicaSpecs{}.template",), "jax"),
    Kind("kubeflow.org", "PaddleJob", ("spec.paddleReplicaSpecs{}.template",), "paddle"),
    Kind("kubeflow.org", "XGBoostJob", ("spec.xgbReplicaSpecs{}.template",), "xgboost"),
    Kind("kubeflow.org", "MPIJob", ("spec.mpiReplicaSpecs{}.template",)),
    Kind("ray.io", "RayCluster", ("spec.workerGroupSpecs[].template",)),
    Kind("ray.io", "RayJob", ("spec.rayClusterSpec.workerGroupSpecs[].template",)),
    Kind("ray.io", "RayCronJob", ("spec.jobTemplate.rayClusterSpec.workerGroupSpecs[].template",)),
    Kind("leaderworkerset.x-k8s.io", "LeaderWorkerSet", ("spec.leaderWorkerTemplate.workerTemplate",)),
    Kind("batch.volcano.sh", "Job", ("spec.tasks[].template",)),
)
_OPTIONAL_LEADER = "spec.leaderWorkerTemplate.leaderTemplate"
_STEP = re.compile(r"[^.\[\]{}]+|\[\]|\{\}")


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """One pod template of a document."""

    kind: Kind
    path: str
    fields: Fields
    """``metadata`` and ``spec``; of a Pod, the document itself."""
    above: tuple[Fields, ...]
    """The mappings that contain the template, the document first."""
    name: str
    """Of the replica, the replicated job or the worker group; of a plain workload, its kind in lower case."""

    @property
    def spec_path(self) -> str:
        """Path of the pod's spec."""
        return f"{self.path}.spec".lstrip(".")

    @property
    def job(self) -> Fields | None:
        """The spec of the batch Job that makes the pods, if one does."""
        return self.above[-1] if self.kind.is_job else None

    @property
    def replicated_job(self) -> Fields:
        """The entry of a JobSet's ``replicatedJobs`` that it belongs to."""
        return self.above[-3]

    @property
    def document(self) -> Fields:
        """The whole document."""
        return self.above[0] if self.above else self.fields

    @property
    def job_path(self) -> str:
        """Path of the Job's spec."""
        return self.path.removesuffix(".template")


def group_of(document: Mapping[str, Any]) -> str:
    """Return the API group: ``batch`` of ``batch/v1``, empty of ``v1``."""
    version = str(document.get("apiVersion") or "")
    return version.rpartition("/")[0]


def kind_of(document: Mapping[str, Any]) -> Kind | None:
    """Return the document's kind; ``None``: not a known one."""
    here = (group_of(document), document.get("kind"))
    return next((kind for kind in KINDS if (kind.group, kind.name) == here), None)


def pod_templates_of(document: Fields, kind: Kind) -> list[PodTemplate]:
    """Return the pod templates of a document, in its order.

    Raises:
        NotInjectable: A part of the way to them is missing or of another type.
    """
    paths = kind.pods
    if kind.group == "ray.io":
        paths = _ray_paths(document, kind)
    elif kind.name == "LeaderWorkerSet" and at(document, _OPTIONAL_LEADER):
        paths = (_OPTIONAL_LEADER, *kind.pods)
    return [template for path in paths for template in _walk(kind, document, _STEP.findall(path), "", (), kind.name.lower())]


def _ray_paths(document: Fields, kind: Kind) -> tuple[str, ...]:
    """The worker groups; where a cluster has none, the head does the work."""
    prefix = kind.pods[0].partition(".workerGroupSpecs")[0]
    selector = f"{prefix.removesuffix('.rayClusterSpec')}.clusterSelector"
    if at(document, selector):
        raise NotInjectable(selector, "the pods are those of a RayCluster that is there already: inject into that one")
    return kind.pods if at(document, f"{prefix}.workerGroupSpecs") else (f"{prefix}.headGroupSpec.template",)


def _walk(kind: Kind, here: Any, steps: list[str], path: str, above: tuple[Fields, ...], name: str) -> Iterator[PodTemplate]:
    if not steps:
        if not isinstance(here, MutableMapping):
            raise NotInjectable(path, "must be a pod template")
        yield PodTemplate(kind, path, here, above, name)
        return
    step, rest = steps[0], steps[1:]
    for key, value in _children(here, step, path):
        if step == "[]":
            label = value.get("name", value.get("groupName", name)) if isinstance(value, Mapping) else name
            yield from _walk(kind, value, rest, f"{path}[{key}]", above, str(label))
        else:
            below = f"{path}.{key}".lstrip(".")
            yield from _walk(kind, value, rest, below, (*above, here), str(key).lower() if step == "{}" else name)


def _children(here: Any, step: str, path: str) -> list[tuple[Any, Any]]:
    if step == "[]":
        if not isinstance(here, MutableSequence) or not here:
            raise NotInjectable(path, "must be a list with an entry")
        return list(enumerate(here))
    if not isinstance(here, MutableMapping) or not here:
        raise NotInjectable(path or "document", "must be a mapping with an entry")
    if step == "{}":
        return list(here.items())
    if here.get(step) is None:
        raise NotInjectable(f"{path}.{step}".lstrip("."), "is missing: the pods are expected below it")
    return [(step, here[step])]


def nested(document: Fields) -> list[tuple[str, Fields]] | None:
    """Return the documents inside a List or an AppWrapper, each with its path; ``None`` for other kinds.

    Raises:
        NotInjectable: An entry is no mapping.
    """
    here = (group_of(document), document.get("kind"))
    if here == ("", "List"):
        return list(_mappings(document.get("items"), "items"))
    if here == ("workload.codeflare.dev", "AppWrapper"):
        parts = _mappings(at(document, "spec.components"), "spec.components")
        return [
            (f"{path}.template", part["template"]) for path, part in parts if isinstance(part.get("template"), MutableMapping)
        ]
    return None


def _mappings(items: Any, path: str) -> Iterator[tuple[str, Fields]]:
    for index, entry in enumerate(items or ()):
        if not isinstance(entry, MutableMapping):
            raise NotInjectable(f"{path}[{index}]", "must be a document")
        yield f"{path}[{index}]", entry


def pod_somewhere(node: Any, path: str = "") -> str | None:
    """Return the path of something that looks like a pod in a document of a kind that is not known."""
    if isinstance(node, Mapping):
        containers = node.get("containers")
        if isinstance(containers, list) and any(isinstance(c, Mapping) and {"name", "image"} <= set(c) for c in containers):
            return path or "document"
        found = (pod_somewhere(value, f"{path}.{key}".lstrip(".")) for key, value in node.items())
    elif isinstance(node, list):
        found = (pod_somewhere(value, f"{path}[{index}]") for index, value in enumerate(node))
    else:
        return None
    return next((where for where in found if where), None)
