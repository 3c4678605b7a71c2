"""Controllers that need an installation of their own: Kubeflow Trainer and Kueue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import Namespace, Object, Refused, apply, kubectl
from tests.cluster.story import Story, assert_no_step_was_lost, assert_two_train_jobs_are_two_runs, steps
from tests.cluster.torch_runs import PATIENCE_S, assert_each_step_was_done_once, rank_zero, torchrun
from tests.cluster.workloads import TRAINER_API, Workloads

STEPS = 80
HIGH, LOW = "high", "low"


@pytest.mark.usefixtures("trainer")
def test_two_train_jobs_of_one_runtime_are_two_runs(story: Story, workloads: Workloads) -> None:
    pod = workloads.pod(["python3", "/scripts/file_trainer.py"], container="node", STEPS=STEPS, SAVE_EVERY=1000)
    story.start(workloads.training_runtime(pod))
    assert_two_train_jobs_are_two_runs(story, workloads, steps=STEPS)


def _has_env_injection() -> bool:
    try:
        kubectl("explain", "trainingruntimes.spec.mlPolicy.torch.envInjection", f"--api-version={TRAINER_API}")
    except Refused:
        return False
    return True


@dataclass(frozen=True)
class Queue:
    """A queue of a namespace; its objects that belong to no namespace have the namespace's name."""

    name: str

    def queued(self, document: Object, level: str, **annotations: str) -> Object:
        """Return a Job that waits for its admission."""
        labels = {"kueue.x-k8s.io/queue-name": "queue", "kueue.x-k8s.io/priority-class": f"{self.name}-{level}"}
        document["metadata"] |= {"labels": labels, "annotations": annotations}
        document["spec"]["suspend"] = True
        return document


@pytest.mark.usefixtures("trainer", "torch")
@pytest.mark.timeout(900)
def test_a_train_job_of_two_nodes_completes_after_more_preemptions_than_it_has_restarts(
    story: Story, workloads: Workloads, two_nodes: list[str]
) -> None:
    # torchrun has the addresses and numbers of nodes from the variables that Trainer gives it.
    torchrun = ["python3", "-m", "torch.distributed.run", "--nproc-per-node=1"]
    command = [*torchrun, "/scripts/train_fsdp.py", "--epochs=8", "--step-seconds=0.2"]
    story.kind, story.trainer = "trainjob", "node"
    pod = workloads.pod(command, torch=True, container="node")
    story.start(workloads.training_runtime(pod, max_restarts=1, env_injection=_has_env_injection()))
    story.namespace.apply(workloads.train_job(nodes=2))
    for life in range(3):
        story.namespace.delete_pod(rank_zero(story, life, 25 * (life + 1)))
    story.weights(timeout_s=PATIENCE_S)
    assert_each_step_was_done_once(story)
    story.completed()


@pytest.fixture
def queue(request: pytest.FixtureRequest, kueue: None, namespace: Namespace) -> Iterator[Queue]:
    """A queue that admits some pods at a time (default: one), and lets a higher priority go first."""
    name, pods = namespace.name, getattr(request, "param", 1)
    group = "kueue.x-k8s.io/v1beta1"
    quotas = {"cpu": "100", "memory": "100Gi", "pods": str(pods)}
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
    yield Queue(name)
    namespace.kubectl("delete", "jobs", "--all", "--cascade=foreground", "--timeout=60s")
    namespace.kubectl("delete", "localqueues.kueue.x-k8s.io", "queue", "--timeout=60s")
    for document in reversed(cluster_wide):
        kubectl("delete", f"{document['kind'].lower()}.kueue.x-k8s.io", document["metadata"]["name"], "--timeout=60s")


def urgent(workloads: Workloads, seconds: int) -> Object:
    pod = workloads.pod(["python3", "-c", f"import time; time.sleep({seconds})"], container="urgent")
    pod["spec"]["terminationGracePeriodSeconds"] = 1
    return workloads.job(pod, name="urgent")


def test_a_job_that_kueue_preempts_goes_on_when_it_is_admitted_again(story: Story, workloads: Workloads, queue: Queue) -> None:
    story.start(queue.queued(workloads.job(workloads.file_pod(STEPS=STEPS, SAVE_EVERY=1000)), LOW))
    story.at_step(20)
    story.namespace.apply(queue.queued(urgent(workloads, 3), HIGH))
    Story(story.namespace, workloads, story.bucket, name="urgent").completed()
    assert story.weights(timeout_s=180) == weights_after(STEPS)
    assert_no_step_was_lost(*story.lives())
    story.completed()


@pytest.mark.usefixtures("torch")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("queue", [2], indirect=True)
def test_a_sharded_job_that_kueue_preempts_goes_on_with_the_one_node_that_is_free(
    story: Story, workloads: Workloads, queue: Queue
) -> None:
    # One or two nodes: the first waits half a minute for the second.
    command = torchrun("run-0.run", "--epochs=4", "--step-seconds=0.2", nodes="1:2")
    service, job = workloads.indexed(workloads.pod(command, torch=True))
    partial = {"job-min-parallelism": "1", "job-completions-equal-parallelism": "true"}
    job = queue.queued(job, LOW, **{f"kueue.x-k8s.io/{name}": value for name, value in partial.items()})
    story.start(service, job)
    rank_zero(story, 0, 25)
    story.namespace.apply(queue.queued(urgent(workloads, 600), HIGH))
    story.weights(timeout_s=PATIENCE_S)
    before, after = [life for life in story.lives() if steps(life)]
    assert after.has(f"resumes from checkpoint-{steps(before)[-1]}")
    assert story.namespace.get("job", "run")["spec"]["parallelism"] == 1
    story.completed()
