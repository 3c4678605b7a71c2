"""Number and index of a run's nodes. A sidecar of several nodes must know that it is not the only one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from sidecar.kubernetes.inject.containers import SIDECAR
from sidecar.kubernetes.inject.fields import Fields, annotations_of, at, entries, growing, is_true, labels_of, named, section
from sidecar.kubernetes.inject.pod_templates import Kind, PodTemplate
from sidecar.kubernetes.inject.reports import InjectWarning

_TOLD = ("JOB_COMPLETION_INDEX", "PET_NNODES", "PET_NODE_RANK")
"""Variables of the trainer's container that the sidecar understands, too."""
ONE_OR_MORE = "1:2"
"""A range of ``PET_NNODES``, as torchrun takes it."""
_OF_SEVERAL = (
    *("ray.io/cluster", "training.kubeflow.org/job-name", "leaderworkerset.sigs.k8s.io/name", "volcano.sh/job-name"),
    *("kueue.x-k8s.io/pod-group-name", "statefulset.kubernetes.io/pod-name"),
)
"""Labels of pods that may be one of several, without their number."""
_STARTED_WITH_FEWER = ("kueue.x-k8s.io/job-min-parallelism", "kueue.x-k8s.io/elastic-job")
"""Annotations of a Job that Kueue may start with fewer pods than its spec says."""
_FEWER_INDICES = "kueue.x-k8s.io/job-completions-equal-parallelism"
_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SERVES = ("ps", "evaluator", "scheduler", "server")
"""Names of replicas that train nothing."""
_LAUNCHER = re.compile(r"\b(mpirun|mpiexec|horovodrun)\b")
_JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
"""Index of a Job among those of one replicated job."""


def told(template: PodTemplate, trainer: Fields, trainer_path: str, *, count: int | None) -> dict[str, Any]:
    """Return the trainer's variables for number and index of nodes: a value, or its source.

    A webhook sees pods, not workloads: the controller has given these variables to the trainer, not to containers added later.
    """
    found = {str(entry["name"]): entry for entry in entries(trainer, "env", trainer_path) if entry.get("name") in _TOLD}
    usable = {name: entry for name, entry in found.items() if "$(" not in str(entry.get("value", ""))}
    said = {name: entry.get("valueFrom", str(entry.get("value", ""))) for name, entry in usable.items()}
    labels = labels_of(template.fields)
    if not said and count is None and template.kind.name == "Pod" and any(label in labels for label in _OF_SEVERAL):
        said["PET_NNODES"] = ONE_OR_MORE
    return said


@dataclass(frozen=True, slots=True)
class Nodes:
    """The pods that make one run, as far as the document alone says it."""

    count: int | None = None
    """``None``: the document does not say."""
    index_field: str | None = None
    """Field of a pod that holds its index among them; ``None``: no field certainly does."""


def nodes_of(document: Fields, kind: Kind, chosen: list[PodTemplate]) -> tuple[Nodes, list[InjectWarning]]:
    """Return the nodes of a run.

    More than one is always written, because a lone sidecar decides what several must agree on. The index is written only where
    it cannot be wrong; else the hook's markers have it.
    """
    spec = document.get("spec") or {}
    if kind.is_job:
        return _nodes_of_jobs(kind, chosen)
    if kind.name == "StatefulSet":
        count = _whole(spec.get("replicas"), 1)
        return (Nodes(count, "metadata.labels['apps.kubernetes.io/pod-index']") if count > 1 else Nodes()), []
    if kind.name == "LeaderWorkerSet":
        size = _whole((spec.get("leaderWorkerTemplate") or {}).get("size"), 1)
        return (Nodes(size, "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']") if size > 1 else Nodes()), []
    if kind.group == "apps":
        count = _whole(spec.get("replicas"), 1)
    elif kind.group in ("kubeflow.org", "ray.io", "batch.volcano.sh"):
        scaled = any(is_true(above.get("enableInTreeAutoscaling")) for template in chosen for above in template.above)
        count = sum(_replicas(template, scaled=scaled) for template in chosen)
    else:
        count = 1
    return Nodes(count if count > 1 else None), [_as_one_run(chosen)] if _has_other_parts(kind, chosen) else []


def _has_other_parts(kind: Kind, chosen: list[PodTemplate]) -> bool:
    """Whether some of the pods seem to serve or launch: each would count as a node, and save nothing."""
    if kind.name == "MPIJob" or len(chosen) == 1:
        return False
    return any(template.name in _SERVES or _launches(template) for template in chosen)


def _launches(template: PodTemplate) -> bool:
    found = at(template.fields, "spec.containers") or ()
    words = [str(word) for container in found for key in ("command", "args") for word in container.get(key) or ()]
    return any(map(_LAUNCHER.search, words))


def _as_one_run(chosen: list[PodTemplate]) -> InjectWarning:
    names = ", ".join(template.name for template in chosen)
    text = f"{names}: all of their pods write to one prefix, as one run; where only some train, name those with --pods"
    return InjectWarning(re.split(r"\[|\.\w+\.template$", chosen[0].path)[0], text)


def _replicas(template: PodTemplate, *, scaled: bool) -> int:
    above, elastic = template.above[-1], at(template.document, "spec.elasticPolicy.maxReplicas")
    most = max(_whole(above.get("replicas"), 1), _whole(above.get("maxReplicas"), 0) if scaled else 0, _whole(elastic, 0))
    return most * _whole(above.get("numOfHosts"), 1)


def _nodes_of_jobs(kind: Kind, chosen: list[PodTemplate]) -> tuple[Nodes, list[InjectWarning]]:
    if kind.group == "trainer.kubeflow.org":
        return Nodes(index_field=_index_in_runtime(chosen)), []  # the TrainJob says how many
    if kind.group == "batch":
        return _nodes_of_job(chosen[0])
    if len(chosen) > 1:
        return Nodes(), [_as_one_run(chosen)]
    [template] = chosen
    job = template.job or {}
    replicas, pods = (
        _whole(template.replicated_job.get("replicas"), 1),
        _whole(job.get("completions") or job.get("parallelism"), 1),
    )
    if replicas == 1:
        return Nodes(pods), []
    # Every Job of the set counts its pods from 0: an index means nothing beyond it.
    return (Nodes(replicas, _JOB_INDEX) if pods == 1 else Nodes()), []


def _index_in_runtime(chosen: list[PodTemplate]) -> str | None:
    """Return the field with a pod's index, if all nodes are pods of one Job; by mpirun's hosts it may be another one."""
    is_one_job = len(chosen) == 1 and _whole(chosen[0].replicated_job.get("replicas"), 1) == 1
    return _COMPLETION_INDEX if is_one_job and at(chosen[0].document, "spec.mlPolicy.mpi") is None else None


def _nodes_of_job(template: PodTemplate) -> tuple[Nodes, list[InjectWarning]]:
    job, annotations = template.job or {}, annotations_of(template.document)
    parallel, wanted = _whole(job.get("parallelism"), 1), _whole(job.get("completions"), 1)
    if job.get("completionMode") != "Indexed":
        return Nodes(parallel if parallel > 1 else None), []
    if any(annotations.get(name) for name in _STARTED_WITH_FEWER):
        # Kueue changes the numbers when it admits the Job: the hook counts the pods that are there.
        said = []
        if str(annotations.get(_FEWER_INDICES)) != "true":
            text = f"Kueue may run fewer pods at once than there are indices: set the annotation {_FEWER_INDICES}"
            said = [InjectWarning("metadata.annotations", text)]
        return Nodes(), said
    if parallel < wanted:
        text = f"{wanted} indices that do not run at once: each is a run of its own and needs its own prefix in --store"
        return Nodes(), [InjectWarning(f"{template.job_path}.completions", text)]
    return Nodes(wanted), []


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def put_env_injection(template: PodTemplate) -> None:
    """Let Trainer 2.3 tell the sidecar how many nodes a TrainJob has, where its runtime has the field ``envInjection``.

    Older versions do not know the field and refuse it, so it is filled in only where it stands already, empty or not.
    """
    torch = at(template.document, "spec.mlPolicy.torch") if template.kind.group == "trainer.kubeflow.org" else None
    if torch is None or "envInjection" not in torch:
        return
    path = "spec.mlPolicy.torch.envInjection"
    targets = growing(section(torch, "envInjection", "spec.mlPolicy.torch"), "targets", path)
    target = named(targets, template.name, key="jobName")
    if target is None:
        targets.append({"jobName": template.name, "containerNames": [SIDECAR]})
    elif SIDECAR not in target["containerNames"]:
        target["containerNames"].append(SIDECAR)
