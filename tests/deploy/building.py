"""Documents to inject into, and how to look at what came out."""

from __future__ import annotations

import copy
from typing import Any

from sidecar.kubernetes.inject import Injected, Options
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.schemas import pod_templates

STORE = Options(store="s3://bucket/runs/{name}")


def asked(**given: str) -> Options:
    given = {"store": "s3://bucket/run"} | given
    return with_given(Options(), {name.replace("_", "-"): value for name, value in given.items()})


def job(**pod: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "i", "env": [{"name": "CKPT_HOOK", "value": "auto"}]}]
    spec = {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 120, "securityContext": {"runAsUser": 1000}}
    spec |= {"containers": containers, **pod}
    inner = {"backoffLimit": 1000, "template": {"spec": spec}}  # of restartPolicy OnFailure: preemptions count there
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, "spec": inner}


def pod_of(done: Injected) -> dict[str, Any]:
    [template] = pod_templates(done.document)
    return template["spec"]


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    return named([*pod.get("initContainers", []), *pod["containers"]], "checkpoint-sidecar")


def values(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", "from elsewhere") for entry in container.get("env", [])}


def in_any_order(pod: dict[str, Any]) -> dict[str, Any]:
    """The same pod, with the variables of each container sorted."""
    pod = copy.deepcopy(pod)
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        container.get("env", []).sort(key=lambda entry: str(entry["name"]))
    return pod


def several(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    group = {"Job": "batch/v1", "StatefulSet": "apps/v1", "Deployment": "apps/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
    group |= {"PyTorchJob": "kubeflow.org/v1", "RayCluster": "ray.io/v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
    return {"apiVersion": group[kind], "kind": kind, "metadata": {"name": "x"}, "spec": spec}


POD = {"spec": {"containers": [{"name": "pytorch", "image": "i"}]}}
INDEXED = {"completionMode": "Indexed", "completions": 4, "parallelism": 4, "template": POD}


def in_pod(path: str, value: Any, **more: Any) -> dict[str, Any]:
    """A Job whose document was changed at one path of its pod."""
    document = job(**more)
    here: Any = document["spec"]["template"]["spec"]
    *way, last = path.split(".")
    for step in way:
        here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
    if value is None:
        del here[last]
    else:
        here[last] = value
    return document


def with_volume(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    mounts = [{"name": "v", "mountPath": "/checkpoints", **mount}]
    return in_pod("containers.0.volumeMounts", mounts, volumes=[{"name": "v", **volume}])


def in_job(**fields: Any) -> dict[str, Any]:
    document = job()
    document["spec"] |= fields
    return document
