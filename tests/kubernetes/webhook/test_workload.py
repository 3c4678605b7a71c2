"""Which run a pod belongs to that reaches the webhook: its own name is another one each time a controller makes it."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonpatch
import pytest

from sidecar.kubernetes.inject.options import Options, with_given
from sidecar.kubernetes.webhook.review import answer
from tests.deploy.building import sidecar_of
from tests.kubernetes.inject.test_workload import run_of
from tests.kubernetes.webhook.test_review import admission

DEFAULTS = with_given(Options(), {"store": "s3://bucket/runs/{namespace}/{name}"})


def owned(kind: str, name: str) -> dict[str, Any]:
    return {"ownerReferences": [{"apiVersion": "x/v1", "kind": kind, "name": name, "uid": "u", "controller": True}]}


def answered(**metadata: Any) -> dict[str, Any]:
    found = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata | {"labels": {"checkpoint-sidecar/inject": "true"} | metadata.get("labels", {})},
        "spec": {"containers": [{"name": "main", "image": "i"}]},
    }
    response = answer(admission(found), DEFAULTS)["response"]
    if not response["allowed"]:
        return response
    return jsonpatch.apply_patch(found, json.loads(base64.b64decode(response["patch"])))


RAY = "ray.io/cluster"
ORIGIN = "ray.io/originated-from-cr-name"
MADE = {
    "Job": ({"labels": {"batch.kubernetes.io/job-name": "llama"}} | owned("Job", "llama"), "llama", "llama"),
    "JobSet": (
        {"labels": {"jobset.sigs.k8s.io/jobset-name": "llama", "batch.kubernetes.io/job-name": "llama-node-0"}},
        "llama",
        "llama",
    ),
    "PyTorchJob": ({"labels": {"training.kubeflow.org/job-name": "llama"}}, "llama", "llama"),
    "RayJob": ({"labels": {RAY: "llama-x7k2p", ORIGIN: "llama"}}, "llama", "rayjob/llama"),
    "RayCluster": ({"labels": {RAY: "llama-prod"}} | owned("RayCluster", "llama-prod"), "llama-prod", "llama-prod"),
    "Deployment": (
        {"labels": {"pod-template-hash": "5f6d7"}} | owned("ReplicaSet", "llama-5f6d7"),
        "llama",
        "deployment/llama",
    ),
    "StatefulSet": (
        {"name": "llama-0", "labels": {"app.kubernetes.io/instance": "release"}} | owned("StatefulSet", "llama"),
        "llama",
        "statefulset/llama",
    ),
    "LeaderWorkerSet": (
        {
            "labels": {
                "leaderworkerset.sigs.k8s.io/name": "llama",
                "leaderworkerset.sigs.k8s.io/group-index": "1",
            }
        },
        "llama-1",
        "llama-1",
    ),
    "Volcano": ({"labels": {"volcano.sh/job-name": "llama"}}, "llama", "llama"),
    "pod group": ({"labels": {"kueue.x-k8s.io/pod-group-name": "llama"}}, "llama", "llama"),
    "Pod": ({"name": "llama"}, "llama", "pod/llama"),
    "of a release": ({"generateName": "x-", "labels": {"app.kubernetes.io/instance": "llama"}}, "llama", None),
}


@pytest.mark.parametrize("kind", MADE)
def test_every_pod_knows_its_run_and_its_job(kind: str) -> None:
    metadata, name, job = MADE[kind]
    pod = answered(**{"generateName": "llama-"} | metadata)
    assert run_of(pod, "research", **metadata.get("labels", {})) == (
        f"s3://bucket/runs/research/{name}",
        job and f"research/{job}",
    )


def test_a_ray_jobs_random_cluster_is_refused_with_what_to_do() -> None:
    response = answered(generateName="llama-", labels={RAY: "llama-x7k2p"})
    assert not response["allowed"]
    assert f"the label {ORIGIN} with the RayJob's name" in response["status"]["message"]
    pod = answered(
        generateName="llama-", labels={RAY: "llama-x7k2p"}, annotations={"checkpoint-sidecar/store": "s3://bucket/llama"}
    )
    assert run_of(pod, "research") == ("s3://bucket/llama", None)


def test_the_sidecar_has_its_private_volume() -> None:
    pod = answered(name="llama")
    mounts = {mount["name"]: mount["mountPath"] for mount in sidecar_of(pod["spec"])["volumeMounts"]}
    assert mounts == {"checkpoints": "/checkpoints", "checkpoint-sidecar-state": "/state"}
    assert [mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]] == ["checkpoints"]
