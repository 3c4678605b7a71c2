"""How a workload is named, owned and suspended."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.job.status import job_status
from sidecar.core.job.workloads import (
    KINDS,
    WorkloadKind,
    is_suspended,
    kind_called,
    owner_of,
    pod_selector,
    suspension,
    why_no_pods,
    why_not_suspended,
)


@pytest.mark.parametrize("text", ["job", "jobs", "Job", "jobs.batch"])
def test_a_kind_has_the_names_that_kubectl_takes(text: str) -> None:
    kind = kind_called(text)
    assert kind is not None
    assert kind.kind == "Job"


RESOURCES = {
    "TrainJob": ("trainjobs.trainer.kubeflow.org", "jobset.sigs.k8s.io/jobset-name=run"),
    "JobSet": ("jobsets.jobset.x-k8s.io", "jobset.sigs.k8s.io/jobset-name=run"),
    "Job": ("jobs.batch", "batch.kubernetes.io/job-name=run"),
    "PyTorchJob": ("pytorchjobs.kubeflow.org", "training.kubeflow.org/job-name=run"),
    "MPIJob": ("mpijobs.kubeflow.org", "training.kubeflow.org/job-name=run"),
    "RayJob": ("rayjobs.ray.io", "ray.io/originated-from-cr-name=run"),
    "RayCluster": ("rayclusters.ray.io", "ray.io/cluster=run"),
    "LeaderWorkerSet": ("leaderworkersets.leaderworkerset.x-k8s.io", "leaderworkerset.sigs.k8s.io/name=run"),
    "StatefulSet": ("statefulsets.apps", "a=1,b=2"),
    "Deployment": ("deployments.apps", "a=1,b=2"),
    "Pod": ("pods", None),
}


def test_each_kind_has_its_resource_and_the_selector_of_its_pods() -> None:
    workload = {"metadata": {"name": "run"}, "spec": {"selector": {"matchLabels": {"b": "2", "a": "1"}}}}
    assert {kind.kind: (kind.resource, pod_selector(kind, workload)) for kind in KINDS} == RESOURCES
    assert {kind.kind for kind in KINDS if pod_selector(kind, {}) is None} == {"StatefulSet", "Deployment", "Pod"}


def test_an_unknown_kind_is_none() -> None:
    assert kind_called("cronjob") is None


def test_pods_are_found_by_the_label_of_their_controller_or_its_selector() -> None:
    selectors = {}
    for kind in KINDS:
        spec = {"selector": {"matchLabels": {"b": "2", "a": "1"}}}
        selectors[kind.kind] = pod_selector(kind, {"metadata": {"name": "run"}, "spec": spec})
    assert selectors["Job"] == "batch.kubernetes.io/job-name=run"
    assert selectors["TrainJob"] == selectors["JobSet"] == "jobset.sigs.k8s.io/jobset-name=run"
    assert selectors["StatefulSet"] == "a=1,b=2"
    assert selectors["Pod"] is None


def test_the_pods_of_a_ray_job_are_those_of_its_present_cluster() -> None:
    """KubeRay labels RayCluster and submitter with the RayJob's name, and the pods with the cluster's name alone."""
    kind = kind_called("rayjob")
    assert kind is not None
    assert pod_selector(kind, {"metadata": {"name": "run"}, "status": {"rayClusterName": "run-x7f9z"}}) == (
        "ray.io/cluster=run-x7f9z"
    )


def test_a_ray_job_comes_before_the_job_of_its_name_that_submits_its_script() -> None:
    order = [kind.kind for kind in KINDS]
    assert order.index("TrainJob") < order.index("JobSet") < order.index("Job")
    assert order.index("RayJob") < order.index("Job")


def test_the_owner_is_the_controller_of_a_known_kind() -> None:
    owners = [{"kind": "Secret", "name": "other"}, {"kind": "JobSet", "name": "run", "controller": True}]
    found = owner_of({"metadata": {"ownerReferences": owners}})
    assert found is not None
    assert (found[0].kind, found[1]) == ("JobSet", "run")
    assert owner_of({"metadata": {"ownerReferences": [{"kind": "CronJob", "name": "nightly", "controller": True}]}}) is None
    assert owner_of({"metadata": {}}) is None
    assert owner_of({}) is None


FIELDS = {
    **{kind: {"spec": {"suspend": True}} for kind in ("TrainJob", "JobSet", "Job", "RayJob")},
    **{kind: {"spec": {"runPolicy": {"suspend": True}}} for kind in ("PyTorchJob", "MPIJob")},
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_a_kind_can_be_suspended_or_says_what_to_do_instead(kind: WorkloadKind) -> None:
    why = why_not_suspended(kind, {"metadata": {"name": "run"}, "spec": {"shutdownAfterJobFinishes": True}})
    assert (why is None) == (kind.kind in FIELDS)
    assert why in (
        None,
        f"this command suspends no {kind.kind} (TrainJob, JobSet, RayJob, Job, PyTorchJob, MPIJob): "
        "'kubectl ckpt save', then delete it",
    )
    assert (why_not_suspended(kind, {}) is None) == (why is None and kind.kind != "RayJob")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.suspend], ids=lambda kind: kind.kind)
def test_what_suspends_a_kind_is_seen_as_that(kind: WorkloadKind) -> None:
    assert suspension(kind, suspends=True) == FIELDS[kind.kind]
    assert is_suspended(suspension(kind, suspends=True))
    assert not is_suspended(suspension(kind, suspends=False))
    suspended = {"metadata": {"name": "run"}} | suspension(kind, suspends=True)
    assert why_not_suspended(kind, suspended) == f"{kind.kind} run is suspended already"


@pytest.mark.parametrize(
    "spec", [{}, {"shutdownAfterJobFinishes": True, "clusterSelector": {"a": "b"}}, {"shutdownAfterJobFinishes": False}]
)
def test_a_ray_job_that_kuberay_would_fail_is_not_suspended(spec: dict[str, Any]) -> None:
    kind = kind_called("rayjob")
    assert kind is not None
    assert "shutdownAfterJobFinishes: true" in (why_not_suspended(kind, {"metadata": {"name": "run"}, "spec": spec}) or "")


def test_a_job_of_kueue_or_one_that_is_suspended_is_refused() -> None:
    [job] = [kind for kind in KINDS if kind.kind == "Job"]
    queued = {"metadata": {"name": "run", "labels": {"kueue.x-k8s.io/queue-name": "q"}}, "spec": {"suspend": False}}
    assert why_not_suspended(job, queued) == (
        "Job run is queued by Kueue, which would start it again: 'kubectl ckpt save', then set "
        "spec.active: false on its Workload (kubectl get workloads.kueue.x-k8s.io)"
    )
    suspended = {"metadata": {"name": "run", "labels": None}, "spec": {"suspend": True}}
    assert why_not_suspended(job, suspended) == "Job run is suspended already"


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ({}, "The job has no pods yet"),
        ({"spec": {"suspend": True}}, "The job is suspended: it has no pods"),
        ({"spec": {"runPolicy": {"suspend": True}}}, "The job is suspended: it has no pods"),
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, "The job has completed: its pods are gone"),
        ({"status": {"conditions": [{"type": "Completed", "status": "True"}]}}, "The job has completed: its pods are gone"),
        ({"status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}, "The job has completed: its pods are gone"),
        ({"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, "The job has failed: its pods are gone"),
        ({"status": {"conditions": [{"type": "Failed", "status": "False"}]}}, "The job has no pods yet"),
    ],
)
def test_a_job_without_pods_says_why(workload: dict[str, Any], said: str) -> None:
    assert why_no_pods(workload) == said
    assert job_status([], without_pods=said).headline == said
