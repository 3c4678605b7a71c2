"""Controllers that need an installation of their own: Kubeflow Trainer and Kueue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import Namespace, Object, apply, kubectl, until
from tests.cluster.story import Story, assert_no_step_was_lost
from tests.cluster.workloads import Workloads

STEPS = 80
HIGH, LOW = "high", "low"


def runtime(workloads: Workloads) -> Object:
    pod = workloads.pod(["python3", "/scripts/file_trainer.py"], container="node", STEPS=STEPS, SAVE_EVERY=1000)
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": {"template": pod}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "durable", "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"failurePolicy": {"maxRestarts": 10}, "replicatedJobs": [job]}},
        },
    }


def train_job(name: str) -> Object:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": "durable"}, "trainer": {"numNodes": 1}},
    }


@pytest.mark.usefixtures("trainer")
def test_two_train_jobs_of_one_runtime_are_two_runs(story: Story, workloads: Workloads) -> None:
    story.start(runtime(workloads))
    names = ("one", "two")
    story.namespace.apply(*map(train_job, names))
    runs = [Story(story.namespace, workloads, story.bucket, name=name, trainer="node", kind="trainjob") for name in names]
    lives = until(lambda: found if len(found := runs[0].lives()) == 2 else [], what=story.namespace.watch.report)
    for life in lives:
        until(lambda life=life: life.has("step 20"), what="step 20")  # type: ignore[misc]
        story.namespace.delete_pod(life.pod)
    for run in runs:
        run.completed(timeout_s=120)
        assert run.committed()[-1] == STEPS
    ends = [line for life in runs[0].lives() for line in life.lines if line.startswith("weights ")]
    assert ends == [f"weights {weights_after(STEPS)}"] * 2


@pytest.fixture
def queue(kueue: None, namespace: Namespace) -> Iterator[str]:
    """A queue that admits one pod at a time, and lets a higher priority go first. Named as the namespace."""
    name = namespace.name
    group = "kueue.x-k8s.io/v1beta1"
    quotas = {"cpu": "100", "memory": "100Gi", "pods": "1"}
    resources = [{"name": each, "nominalQuota": quota} for each, quota in quotas.items()]
    flavors = {"coveredResources": list(quotas), "flavors": [{"name": name, "resources": resources}]}
    own = {"metadata": {"name": name}}
    cluster_wide: list[Object] = [
        {"apiVersion": group, "kind": "ResourceFlavor", **own},
        {
            "apiVersion": group,
            "kind": "ClusterQueue",
            **own,
            "spec": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [flavors],
            },
        },
        *(
            {"apiVersion": group, "kind": "WorkloadPriorityClass", "metadata": {"name": f"{name}-{level}"}, "value": value}
            for level, value in ((HIGH, 100), (LOW, 1))
        ),
    ]
    apply(*cluster_wide)
    namespace.apply({"apiVersion": group, "kind": "LocalQueue", "metadata": {"name": "queue"}, "spec": {"clusterQueue": name}})
    yield name
    namespace.kubectl("delete", "jobs", "--all", "--cascade=foreground", "--timeout=60s")
    namespace.kubectl("delete", "localqueues.kueue.x-k8s.io", "queue", "--timeout=60s")
    for document in reversed(cluster_wide):
        kubectl("delete", f"{document['kind'].lower()}.kueue.x-k8s.io", document["metadata"]["name"], "--timeout=60s")


def test_a_job_that_kueue_preempts_goes_on_when_it_is_admitted_again(story: Story, workloads: Workloads, queue: str) -> None:
    def queued(document: Object, level: str) -> Object:
        labels = {"kueue.x-k8s.io/queue-name": "queue", "kueue.x-k8s.io/priority-class": f"{queue}-{level}"}
        document["metadata"]["labels"] = labels
        document["spec"]["suspend"] = True
        return document

    story.start(queued(workloads.job(workloads.file_pod(STEPS=STEPS, SAVE_EVERY=1000)), LOW))
    story.at_step(20)
    short = workloads.pod(["python3", "-c", "import time; time.sleep(3)"], container="urgent")
    story.namespace.apply(queued(workloads.job(short, name="urgent"), HIGH))
    Story(story.namespace, workloads, story.bucket, name="urgent").completed()
    assert story.weights(timeout_s=180) == weights_after(STEPS)
    assert_no_step_was_lost(*story.lives())
    story.completed()
