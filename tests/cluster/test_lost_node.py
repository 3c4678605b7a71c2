"""A node that is cut off: its pods go on running, and Kubernetes does not know. It disturbs other tests: run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import Life, kubectl, until
from tests.cluster.settings import ClusterSettings, call_for_node
from tests.cluster.story import Story, steps
from tests.cluster.workloads import Workloads

pytestmark = [pytest.mark.disruptive, pytest.mark.timeout(600)]
STEPS = 200
SLOW = {"STEPS": STEPS, "STEP_S": 0.5, "SAVE_EVERY": 10}
"""It still trains when the cluster has noticed, half a minute later."""
LoseNode = Callable[[Life], str]


@pytest.fixture
def lose_node(story: Story, settings: ClusterSettings, two_nodes: list[str]) -> Iterator[LoseNode]:
    """Cuts off the node of a pod, and returns its name."""
    if not settings.lose_node or not settings.restore_node:
        pytest.skip("CKPT_CLUSTER_LOSE_NODE and CKPT_CLUSTER_RESTORE_NODE are not set")
    lost: list[str] = []

    def lose(life: Life) -> str:
        node: str = story.namespace.watch.pods[life.pod]["spec"]["nodeName"]
        call_for_node(settings.lose_node, node)
        lost.append(node)
        until(lambda: _is_ready(node) != "True", what=f"{node} is not ready", timeout_s=120, every_s=1)
        return node

    yield lose
    for node in lost:
        call_for_node(settings.restore_node, node)
        until(lambda node=node: _is_ready(node) == "True", what=f"{node} is ready", timeout_s=120, every_s=1)  # type: ignore[misc]


def _is_ready(node: str) -> str:
    return kubectl("get", "node", node, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}")


def test_a_run_goes_on_elsewhere_when_its_node_is_declared_lost(
    story: Story, workloads: Workloads, lose_node: LoseNode
) -> None:
    story.start(workloads.job(workloads.file_pod(**SLOW)))
    node = lose_node(story.at_step(12))
    # What a person, or a controller of the cloud, says once it is sure. Its pods are gone for Kubernetes, and still run.
    taint = "node.kubernetes.io/out-of-service"
    kubectl("taint", "node", node, f"{taint}=lost:NoExecute")
    try:
        _goes_on(story)
    finally:
        kubectl("taint", "node", node, f"{taint}-")


def test_a_replacement_takes_the_run_over_from_a_pod_that_still_runs(
    story: Story, workloads: Workloads, lose_node: LoseNode
) -> None:
    story.start(workloads.job(workloads.file_pod(**SLOW), podReplacementPolicy="TerminatingOrFailed"))
    first = story.at_step(12)
    lose_node(first)
    story.namespace.delete_pod(first.pod, "--force", "--grace-period=0")
    _goes_on(story)


def _goes_on(story: Story) -> None:
    assert story.weights(timeout_s=300) == weights_after(STEPS)
    second = story.lives()[1]
    # From what the first pod had made durable; it went on committing until it was fenced.
    assert 10 < steps(second)[0] <= STEPS
    story.durable(STEPS)
    assert len(story.sidecars()) == 2, "the replacement's sidecar does not end"
    story.completed()
