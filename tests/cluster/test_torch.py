"""Trainings with PyTorch, on one node and on two: the weights of an interrupted run are those of an uninterrupted one."""

from __future__ import annotations

import pytest

from tests.cluster.kubectl import Namespace, Object
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story, steps
from tests.cluster.torch_runs import PATIENCE_S, assert_each_step_was_done_once, rank_zero, torchrun
from tests.cluster.workloads import Workloads

pytestmark = [pytest.mark.usefixtures("torch"), pytest.mark.timeout(900)]
REFERENCE = "undisturbed"


def of_reference(story: Story) -> Story:
    return Story(story.namespace, story.workloads, story.bucket, name=REFERENCE, trainer=REFERENCE)


def test_the_weights_of_an_interrupted_run_are_those_of_an_undisturbed_one(story: Story, workloads: Workloads) -> None:
    command = ["python3", "/scripts/train_torch.py", "--epochs=6", "--step-seconds=0.2"]
    undisturbed = workloads.job(workloads.pod(command, torch=True, container=REFERENCE), name=REFERENCE)
    story.start(undisturbed, workloads.job(workloads.pod(command, torch=True)))
    first = story.at_step(30, timeout_s=PATIENCE_S)
    story.namespace.delete_pod(first.pod)
    second = story.at_step(60, life=1, timeout_s=PATIENCE_S)
    story.namespace.delete_pod(second.pod)
    weights = story.weights(timeout_s=PATIENCE_S)
    done = [step for life in story.lives() for step in steps(life)]
    assert done == list(range(1, 6 * 16 + 1))
    assert weights == of_reference(story).weights(timeout_s=PATIENCE_S)
    story.completed()


def test_nodes_of_an_indexed_job_that_are_replaced_one_by_one_stop_and_go_on_together(
    story: Story, workloads: Workloads, two_nodes: list[str]
) -> None:
    def documents(name: str, container: str) -> list[Object]:
        command = torchrun(f"{name}-0.{name}", "--epochs=6", "--step-seconds=0.2")
        return workloads.indexed(workloads.pod(command, torch=True, container=container), name=name)

    story.start(*documents(REFERENCE, REFERENCE), *documents("run", "trainer"))
    for life, index in ((0, 1), (1, 0)):
        at = rank_zero(story, life, 30 * (life + 1))
        story.namespace.delete_pod(_pod_of_index(story.namespace, index))
        assert at
    weights = story.weights(timeout_s=PATIENCE_S)
    assert weights == of_reference(story).weights(timeout_s=PATIENCE_S)
    assert_each_step_was_done_once(story)
    story.completed()


def test_a_jobset_of_two_nodes_completes_after_more_preemptions_than_it_has_restarts(
    story: Story, workloads: Workloads, jobsets: None
) -> None:
    story.kind = "jobset"
    command = torchrun("run-node-0-0.run", "--epochs=8", "--step-seconds=0.2")
    story.start(workloads.jobset(workloads.pod(command, torch=True), max_restarts=1))
    for life in range(3):
        last = rank_zero(story, life, 25 * (life + 1))
        story.namespace.delete_pod(last)
    story.weights(timeout_s=PATIENCE_S)
    assert_each_step_was_done_once(story)
    story.completed()


def test_two_nodes_share_a_volume_as_their_store(
    story: Story, workloads: Workloads, settings: ClusterSettings, shared_claim: str
) -> None:
    command = torchrun("run-0.run", "--epochs=4", "--step-seconds=0.2")
    documents = workloads.indexed(workloads.pod(command, torch=True))
    options = ("--grace", "60", "--claim", shared_claim)
    story.start(*documents, options=options, store="file:///store/{namespace}/{name}")
    story.namespace.delete_pod(rank_zero(story, 0, 25))
    story.weights(timeout_s=PATIENCE_S)
    assert_each_step_was_done_once(story)
    story.completed()


def test_a_sharded_run_goes_on_with_fewer_nodes(story: Story, workloads: Workloads) -> None:
    def documents(nodes: int) -> list[Object]:
        command = torchrun("run-0.run", "--epochs=4", "--step-seconds=0.2", nodes=nodes)
        return workloads.indexed(workloads.pod(command, torch=True), nodes=nodes)

    story.start(*documents(2))
    last = rank_zero(story, 0, 25)
    story.namespace.kubectl("delete", "job", "run", "--cascade=foreground", "--timeout=90s")
    story.start(*documents(1))
    story.weights(timeout_s=PATIENCE_S)
    before, after = [life for life in story.lives() if steps(life)]
    assert before.pod == last
    assert after.has(f"resumes from checkpoint-{steps(before)[-1]}")
    story.completed()


def _pod_of_index(namespace: Namespace, index: int) -> str:
    """Return the pod of the run with this completion index."""
    annotation = "batch.kubernetes.io/job-completion-index"
    pods = [pod["metadata"] for pod in namespace.living()]
    name: str = next(
        pod["name"] for pod in pods if pod["annotations"].get(annotation) == str(index) and pod["name"].startswith("run-")
    )
    return name
