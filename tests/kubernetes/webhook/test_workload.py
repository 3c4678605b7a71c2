"""Which run a pod belongs to that reaches the webhook: its own name is another one each time a controller makes it."""

from __future__ import annotations

import base64
import json
from typing import Any

import jsonpatch
import pytest

from sidecar.kubernetes.inject import inject
from sidecar.kubernetes.inject.options import Options, with_given
from sidecar.kubernetes.webhook.review import answer
from tests.deploy.building import job, sidecar_of, values
from tests.deploy.schemas import pod_templates
from tests.kubernetes.inject.test_workload import run_of
from tests.kubernetes.webhook.test_review import admission, pod

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


def test_the_pods_of_a_stateful_set_may_be_one_of_several() -> None:
    labels = {"statefulset.kubernetes.io/pod-name": "llama-1", "apps.kubernetes.io/pod-index": "1"}
    pod = answered(name="llama-1", labels=labels, **owned("StatefulSet", "llama"))
    assert values(sidecar_of(pod["spec"]))["PET_NNODES"] == "1:2"


def test_the_sidecar_has_its_private_volume() -> None:
    pod = answered(name="llama")
    mounts = {mount["name"]: mount["mountPath"] for mount in sidecar_of(pod["spec"])["volumeMounts"]}
    assert mounts == {"checkpoints": "/checkpoints", "checkpoint-sidecar-state": "/state"}
    assert [mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]] == ["checkpoints"]


def of_template(document: dict[str, Any], labels: dict[str, str], owner: str) -> dict[str, Any]:
    """A pod as a controller makes it of an injected workload, with the label that asks the webhook."""
    [template] = pod_templates(document)
    labels = template["metadata"]["labels"] | labels | {"checkpoint-sidecar/inject": "true"}
    metadata = template["metadata"] | {"generateName": "llama-", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata | owned(owner, "llama"), "spec": template["spec"]}


RAY_JOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": "llama"},
    "spec": {"rayClusterSpec": {"workerGroupSpecs": [{"groupName": "gpu", "template": job()["spec"]["template"]}]}},
}


@pytest.mark.parametrize(
    ("document", "labels"), [(job(), {"batch.kubernetes.io/job-name": "llama"}), (RAY_JOB, {RAY: "llama-x7k2p"})]
)
def test_the_sidecar_of_the_manifest_counts_more_than_the_defaults(document: dict[str, Any], labels: dict[str, str]) -> None:
    given = {"store": "s3://mine/{name}", "secret": "mine", "image": "registry.example/mine:2"}
    found = of_template(inject(document, with_given(Options(), given)).document, labels, "Job")
    defaults = {"store": "s3:///runs/{namespace}/{name}", "secret": "data-connection", "image": "x:1", "keep-store": "9"}
    assert "patch" not in answer(admission(found), with_given(Options(), defaults))["response"]
    # The pod's own annotations come before both.
    found["metadata"]["annotations"] = {"checkpoint-sidecar/store": "s3://other/run", "checkpoint-sidecar/secret": "third"}
    response = answer(admission(found), with_given(Options(), defaults))["response"]
    pod = jsonpatch.apply_patch(found, json.loads(base64.b64decode(response["patch"])))
    assert values(sidecar_of(pod["spec"]))["CKPT_STORE"] == "s3://other/run"


def test_the_schedule_that_the_manifest_names_stays_the_run() -> None:
    nightly = {"schedule": "@daily", "jobTemplate": {"spec": job()["spec"]}}
    document = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "nightly"}, "spec": nightly}
    made = inject(document, with_given(Options(), {"store": "s3://bucket/nightly"})).document
    found = of_template(made, {"batch.kubernetes.io/job-name": "nightly-1"}, "Job")
    found["metadata"]["annotations"] = {"checkpoint-sidecar/store": "s3://bucket/nightly"}
    assert "patch" not in answer(admission(found), DEFAULTS)["response"]


def test_a_container_that_another_webhook_adds_gets_no_credentials() -> None:
    defaults = with_given(Options(), {"store": "s3://bucket/{name}", "cloud-identity": "true"})
    found = pod()
    for added in (None, {"name": "proxy", "image": "p"}):
        found["spec"]["containers"] += [added] if added else []
        patch = answer(admission(found), defaults)["response"]["patch"]
        found = jsonpatch.apply_patch(found, json.loads(base64.b64decode(patch)))
    assert found["metadata"]["annotations"]["eks.amazonaws.com/skip-containers"] == "main,proxy"
