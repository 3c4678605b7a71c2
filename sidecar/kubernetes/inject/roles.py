"""Pods of a workload that do not train: they prepare, or launch ranks on other pods."""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.kubernetes.inject.fields import Fields, at, is_true
from sidecar.kubernetes.inject.pod_templates import Kind, PodTemplate
from sidecar.kubernetes.inject.reports import InjectWarning
from sidecar.kubernetes.inject.trainer import has_accelerator
from sidecar.kubernetes.inject.warnings import warnings_of_shell

_TAKE_IT = "name it with --pods if it trains"


def without_helpers(document: Fields, kind: Kind, chosen: list[PodTemplate]) -> tuple[list[PodTemplate], list[InjectWarning]]:
    """Return the pod templates that may train, and warnings about those that are left out.

    A helper has no part of the run's checkpoints. Where all pods are helpers, all stay.
    """
    said = dict(_helpers(document, kind, chosen))
    trains = [template for template in chosen if template.name not in said]
    if not trains:
        return chosen, []
    warnings = []
    for template in chosen:
        if template.name in said:
            warnings += [InjectWarning(template.path, said[template.name]), *_of_launcher(template)]
    return trains, warnings


def warning_of_ray_head(document: Fields, kind: Kind) -> Iterator[InjectWarning]:
    """Yield a warning about the head of a Ray cluster with worker groups, if Ray may place training there, too.

    It does where the head has an accelerator or the workers have none, unless the head offers no CPU: a worker of Ray Train
    asks for one.
    """
    cluster = at(document, kind.pods[0].partition(".workerGroupSpecs")[0]) if kind.group == "ray.io" else None
    if not cluster or not cluster.get("workerGroupSpecs"):
        return
    head = cluster.get("headGroupSpec") or {}
    offered = head.get("rayStartParams") or {}
    in_head = _asks_for_accelerator(head) and str(offered.get("num-gpus")) != "0"
    if str(offered.get("num-cpus")) != "0" and (in_head or not any(map(_asks_for_accelerator, cluster["workerGroupSpecs"]))):
        where = f"{kind.pods[0].partition('workerGroupSpecs')[0]}headGroupSpec.rayStartParams"
        text = 'the head gets no sidecar beside worker groups, and Ray may place training there: give it num-cpus: "0"'
        yield InjectWarning(where, text)


def warning_of_ray_groups(kind: Kind, chosen: list[PodTemplate]) -> Iterator[InjectWarning]:
    """Yield a warning about worker groups without an accelerator beside groups with one: they may only prepare data."""
    if kind.group != "ray.io":
        return
    training = [template.name for template in chosen if _asks_for_accelerator(template.above[-1])]
    for template in chosen if training else ():
        if template.name not in training:
            text = f"{template.name} has no accelerator, and counts as nodes of the run like {', '.join(training)}"
            yield InjectWarning(template.path, f"{text}: where it does not train, --pods {','.join(training)}")


def _asks_for_accelerator(group: Fields) -> bool:
    return any(map(has_accelerator, at(group, "template.spec.containers") or ()))


def _of_launcher(template: PodTemplate) -> Iterator[InjectWarning]:
    """Yield warnings about the launcher's shell: the exit code of mpirun is the job's."""
    containers = (template.fields.get("spec") or {}).get("containers") or () if template.name == "launcher" else ()
    for index, container in enumerate(containers):
        yield from warnings_of_shell(container, f"{template.spec_path}.containers[{index}]", gets_signals=False)


def _helpers(document: Fields, kind: Kind, chosen: list[PodTemplate]) -> Iterator[tuple[str, str]]:
    names = {template.name for template in chosen}
    for template in chosen if kind.has_replicated_jobs else ():
        for other in template.replicated_job.get("dependsOn") or ():
            if other.get("status") == "Complete":
                yield str(other.get("name")), f"gets no sidecar: {template.name} waits for its end, so it prepares; {_TAKE_IT}"
    launches = f"gets no sidecar: mpirun starts the ranks on other pods; {_TAKE_IT}"
    if kind.name == "MPIJob" and "launcher" in names and not is_true(at(document, "spec.runLauncherAsWorker")):
        yield "launcher", launches
    mpi = at(document, "spec.mlPolicy.mpi")
    if kind.group == "trainer.kubeflow.org" and mpi is not None and not is_true(mpi.get("runLauncherAsNode")):
        yield "launcher", launches
