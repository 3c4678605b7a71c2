"""Which run a pod belongs to: two workloads never take each other's prefix for their own."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sidecar.daemon.settings import from_environment
from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject import NotInjectable, Options, inject
from sidecar.kubernetes.inject.options import with_given
from sidecar.store_url import store_place
from tests.deploy.building import asked, sidecar_of
from tests.deploy.schemas import pod_templates

POD: dict[str, Any] = {
    "metadata": {},
    "spec": {"containers": [{"name": "main", "image": "i"}], "restartPolicy": "Never"},
}
EACH = "s3://bucket/runs/{namespace}/{name}"


def workload(version: str, kind: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": metadata or {"name": "llama"}, "spec": spec}


def container(name: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name, "image": "i"}]}}


WORKERS = {"workerGroupSpecs": [{"groupName": "gpu", "replicas": 1, "template": POD}]}
JOBS = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": container("node")}}}]}
KINDS = {
    "Pod": workload("v1", "Pod", POD["spec"]),
    "Job": workload("batch/v1", "Job", {"template": POD}),
    "CronJob": workload("batch/v1", "CronJob", {"jobTemplate": {"spec": {"template": POD}}, "concurrencyPolicy": "Forbid"}),
    "Deployment": workload("apps/v1", "Deployment", {"template": POD}),
    "StatefulSet": workload("apps/v1", "StatefulSet", {"template": POD}),
    "ReplicaSet": workload("apps/v1", "ReplicaSet", {"template": POD}),
    "JobSet": workload("jobset.x-k8s.io/v1alpha2", "JobSet", JOBS),
    "TrainingRuntime": workload("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", {"template": {"spec": JOBS}}),
    "PyTorchJob": workload(
        "kubeflow.org/v1", "PyTorchJob", {"pytorchReplicaSpecs": {"Master": {"template": container("pytorch")}}}
    ),
    "MPIJob": workload("kubeflow.org/v2beta1", "MPIJob", {"mpiReplicaSpecs": {"Worker": {"template": POD}}}),
    "RayJob": workload("ray.io/v1", "RayJob", {"rayClusterSpec": WORKERS}),
    "RayCluster": workload("ray.io/v1", "RayCluster", WORKERS),
    "RayCronJob": workload("ray.io/v1", "RayCronJob", {"jobTemplate": {"rayClusterSpec": WORKERS}}),
    "LeaderWorkerSet": workload(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", {"replicas": 2, "leaderWorkerTemplate": {"workerTemplate": POD}}
    ),
    "Volcano": workload("batch.volcano.sh/v1alpha1", "Job", {"tasks": [{"name": "t", "template": POD}]}),
}
LABELS = {
    "batch.kubernetes.io/job-name": "llama-29",
    "jobset.sigs.k8s.io/jobset-name": "llama",
    "training.kubeflow.org/job-name": "llama",
    "ray.io/cluster": "llama-xk2zd",
    "volcano.sh/job-name": "llama",
    "leaderworkerset.sigs.k8s.io/name": "llama",
    "leaderworkerset.sigs.k8s.io/group-index": "1",
}
"""What controllers write on the pods of a workload that is called llama."""


def started(document: dict[str, Any], namespace: str, **labels: str) -> dict[str, str]:
    """The sidecar's environment as the kubelet makes it: in order, each variable from those before it."""
    [template, *_] = [found for found in pod_templates(document) if "checkpoint-sidecar" in str(found)]
    known = LABELS | (template.get("metadata", {}).get("labels") or {}) | labels
    found: dict[str, str] = {}
    for entry in sidecar_of(template["spec"])["env"]:
        if "value" in entry:
            found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), entry["value"])
            continue
        path = entry["valueFrom"]["fieldRef"]["fieldPath"]
        label = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
        fields = {"metadata.namespace": namespace, "metadata.uid": "uid"}
        found[entry["name"]] = known.get(label[1], "") if label else fields.get(path, "1")
    return found


def run_of(document: dict[str, Any], namespace: str, **labels: str) -> tuple[str, str | None]:
    """Where a pod writes, and which job its sidecar takes itself for."""
    environment = started(document, namespace, **labels)
    # A directory of the pod, which is not here.
    assert environment.pop("CKPT_STATE_DIR") == "/state"
    settings = from_environment(environment)
    store_place(settings.store, volume=settings.dir)
    return settings.store, settings.job


@pytest.mark.parametrize("kind", KINDS)
def test_one_manifest_in_two_namespaces_is_two_runs(kind: str) -> None:
    for document in (KINDS[kind], KINDS[kind] | {"metadata": {"name": "llama", "namespace": "other"}}):
        done = inject(document, asked(store=EACH)).document
        (store_a, job_a), (store_b, job_b) = (run_of(done, namespace) for namespace in ("team-a", "team-b"))
        assert store_a.startswith("s3://bucket/runs/team-a/llama")
        assert store_a.replace("team-a", "team-b") == store_b
        assert (job_a or "").startswith("team-a/")
        assert (job_a or "").replace("team-a", "team-b") == job_b


@pytest.mark.parametrize("kind", KINDS)
def test_two_workloads_on_one_prefix_are_two_jobs(kind: str) -> None:
    renamed = KINDS[kind] | {"metadata": {"name": "mistral"}}
    mine, theirs = (inject(document, asked(store="s3://bucket/run")).document for document in (KINDS[kind], renamed))
    own_labels = {name: "mistral" for name in LABELS if "index" not in name}
    assert run_of(mine, "a")[1] != run_of(theirs, "a", **own_labels)[1]
    assert "llama" in (run_of(mine, "a")[1] or "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_injection_with_a_new_image_keeps_the_run(kind: str) -> None:
    once = inject(KINDS[kind], asked(store=EACH)).document
    again = inject(once, with_given(Options(), {"image": "registry/x:2"})).document
    assert run_of(again, "a") == run_of(once, "a")


def test_what_was_injected_without_a_namespace_gets_one_in_the_right_order() -> None:
    """As an earlier version wrote it: the store first, what names the run after it."""
    once = inject(KINDS["Job"], asked(store=EACH)).document
    env = sidecar_of(once["spec"]["template"]["spec"])["env"]
    env.sort(key=lambda entry: entry["name"] != "CKPT_STORE")
    assert "$(" in started(once, "a")["CKPT_STORE"]
    again = inject(once, asked(store=EACH)).document
    assert run_of(again, "a") == ("s3://bucket/runs/a/llama", "a/llama-29")


def test_each_job_of_a_schedule_is_a_run_and_its_pods_resume_it() -> None:
    done = inject(KINDS["CronJob"], asked(store=EACH)).document
    nights = [run_of(done, "a", **{"batch.kubernetes.io/job-name": name}) for name in ("llama-28", "llama-29", "llama-29")]
    assert nights == [(f"s3://bucket/runs/a/{name}", f"a/{name}") for name in ("llama-28", "llama-29", "llama-29")]


def test_a_schedule_with_one_prefix_is_one_job_and_said_to_resume_what_has_finished() -> None:
    done = inject(KINDS["CronJob"], asked(store="s3://bucket/nightly"))
    jobs = {run_of(done.document, "a", **{"batch.kubernetes.io/job-name": name})[1] for name in ("llama-28", "llama-29")}
    assert jobs == {"a/cronjob/llama"}
    assert [warning.path for warning in done.warnings if "prefix" in warning.text] == ["spec.schedule"]
    at_once = workload("batch/v1", "CronJob", {"jobTemplate": {"spec": {"template": POD}}})
    said = [warning.path for warning in inject(at_once, asked(store="s3://bucket/nightly")).warnings]
    assert {"spec.schedule", "spec.concurrencyPolicy"} <= set(said)
    assert "spec.concurrencyPolicy" not in [warning.path for warning in inject(at_once, asked(store=EACH)).warnings]


def test_a_retry_of_a_ray_job_is_the_same_run_though_its_cluster_is_another() -> None:
    done = inject(KINDS["RayJob"], asked(store=EACH)).document
    assert run_of(done, "a", **{"ray.io/cluster": "llama-bbbbb"}) == run_of(done, "a", **{"ray.io/cluster": "llama-ccccc"})
    assert run_of(done, "a") == ("s3://bucket/runs/a/llama", "a/rayjob/llama")


@pytest.mark.parametrize("kind", ["Job", "JobSet", "PyTorchJob", "RayCluster", "Volcano", "TrainingRuntime"])
def test_a_name_that_the_server_makes_is_the_runs_own(kind: str) -> None:
    document = KINDS[kind] | {"metadata": {"generateName": "llama-"}}
    done = inject(document, asked(store=EACH))
    names = [dict.fromkeys(LABELS, called) for called in ("llama-1", "llama-2")]
    assert [run_of(done.document, "a", **labels)[0] for labels in names] == [f"s3://bucket/runs/a/llama-{n}" for n in (1, 2)]
    assert not [warning for warning in done.warnings if "generateName" in warning.path]


@pytest.mark.parametrize(("labels", "is_shared"), [({}, True), ({"kueue.x-k8s.io/pod-group-name": "llama"}, False)])
def test_pods_with_names_of_the_server_share_a_prefix_unless_a_label_names_their_run(
    labels: dict[str, str], is_shared: bool
) -> None:
    spec = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i"}]}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"generateName": "llama-", "labels": labels}, "spec": spec}
    said = [warning.path for warning in inject(document, asked(store=EACH)).warnings]
    assert ("metadata.generateName" in said) == is_shared


def test_groups_of_a_leader_worker_set_are_runs_of_their_own() -> None:
    done = inject(KINDS["LeaderWorkerSet"], asked(store=EACH))
    runs = {run_of(done.document, "a", **{"leaderworkerset.sigs.k8s.io/group-index": index}) for index in ("0", "1")}
    assert runs == {(f"s3://bucket/runs/a/llama-{index}", f"a/llama-{index}") for index in (0, 1)}
    assert not [warning for warning in done.warnings if warning.path == "spec.replicas"]
    assert [warning for warning in inject(KINDS["LeaderWorkerSet"], asked()).warnings if warning.path == "spec.replicas"]


def test_pods_that_are_ranks_of_one_run_are_not_parted_by_their_names() -> None:
    spec = {"containers": [{"name": "main", "image": "i", "env": [{"name": "PET_NNODES", "value": "2"}]}]}
    for rank in ("rank-0", "rank-1"):
        assert run_of(inject(workload("v1", "Pod", spec, name=rank), asked()).document, "a") == ("s3://bucket/run", None)


def test_before_1_27_the_label_of_a_job_had_no_prefix() -> None:
    done = inject(KINDS["CronJob"], asked(store=EACH, kubernetes_version="1.26")).document
    assert run_of(done, "a", **{"job-name": "llama-7", "batch.kubernetes.io/job-name": ""})[0] == "s3://bucket/runs/a/llama-7"


def test_a_train_job_has_its_runtimes_prefix_or_one_of_its_own() -> None:
    run = workload("trainer.kubeflow.org/v1alpha1", "TrainJob", {"runtimeRef": {"name": "x"}}, generateName="llama-")
    [patch] = inject(run, asked(store=EACH)).document["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    [ours] = job["template"]["spec"]["template"]["spec"]["initContainers"]
    assert [entry["name"] for entry in ours["env"]] == ["POD_NAMESPACE", "JOBSET_NAME", "CKPT_STORE"]
    assert ours["env"][2]["value"] == "s3://bucket/runs/$(POD_NAMESPACE)/$(JOBSET_NAME)"


@pytest.mark.parametrize("kind", ["CronJob", "JobSet", "TrainingRuntime", "LeaderWorkerSet"])
@pytest.mark.parametrize("store", [EACH, "s3://bucket/{name}/x", "s3:///{namespace}-{name}"])
def test_a_pod_without_the_label_that_names_its_run_is_refused(kind: str, store: str) -> None:
    """Kubernetes fills in the empty text, and all such pods would have one prefix."""
    document = KINDS[kind] | {"metadata": {"generateName": "llama-"}}
    done = inject(document, asked(store=store)).document
    environment = started(done, "a", **dict.fromkeys(LABELS, "")) | {"AWS_S3_BUCKET": "bucket", "CKPT_STATE_DIR": ""}
    with pytest.raises(ConfigurationError, match=r"NAME|LWS_") as refused:
        from_environment(environment)
    assert "the pod does not have the label" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_trailing_slash_is_no_missing_name() -> None:
    assert from_environment({"CKPT_STORE": "s3://bucket/run/", "JOB_NAME": "x"}).job == "default/x"


def test_two_train_jobs_of_one_runtime_are_two_runs() -> None:
    runtime = inject(KINDS["TrainingRuntime"], asked(store=EACH)).document
    runs = [run_of(runtime, "a", **{"jobset.sigs.k8s.io/jobset-name": name}) for name in ("llama", "mistral")]
    assert runs == [("s3://bucket/runs/a/llama", "a/llama"), ("s3://bucket/runs/a/mistral", "a/mistral")]


POD_TEMPLATE = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "llama"}, "template": POD}


@pytest.mark.parametrize(
    ("document", "store", "path"),
    [
        (KINDS["TrainingRuntime"], "s3://bucket/run", "metadata.name"),
        (KINDS["TrainingRuntime"], EACH, None),
        (POD_TEMPLATE, EACH, "metadata.name"),
        (KINDS["RayCronJob"], "s3://bucket/run", "spec.schedule"),
        (KINDS["Job"], "s3://bucket/run", None),
    ],
)
def test_a_prefix_that_several_runs_share_is_said(document: dict[str, Any], store: str, path: str | None) -> None:
    said = [warning.path for warning in inject(document, asked(store=store)).warnings if "one prefix" in warning.text]
    assert said[:1] == ([] if path is None else [path])


def test_a_variable_that_nothing_filled_in_is_no_store() -> None:
    with pytest.raises(ValueError, match=r"still has \$\(POD_NAMESPACE\)"):
        store_place("s3://bucket/runs/$(POD_NAMESPACE)/x")


def test_a_claim_is_mounted_at_a_folder_that_is_known() -> None:
    with pytest.raises(NotInjectable, match="its first folder is where the claim is mounted"):
        inject(KINDS["Job"], asked(store="file:///{namespace}/x", claim="c"))
    with pytest.raises(ConfigurationError, match="CKPT_STATE_DIR: the sidecar gets a volume of its own"):
        with_given(Options(), {"CKPT_STATE_DIR": "/x"})
