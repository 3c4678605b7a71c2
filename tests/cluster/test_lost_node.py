"""A node that is cut off: its pods go on running, and Kubernetes does not know. It disturbs other tests: run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import kubectl, until
from tests.cluster.settings import ClusterSettings, call_for_node
from tests.cluster.story import Story, steps
from tests.cluster.workloads import Workloads

pytestmark = pytest.mark.disruptive
STEPS = 600


@pytest.fixture
def lose_node(settings: ClusterSettings, two_nodes: list[str]) -> Iterator[Callable[[str], None]]:
    if not settings.lose_node or not settings.restore_node:
        pytest.skip("CKPT_CLUSTER_LOSE_NODE and CKPT_CLUSTER_RESTORE_NODE are not set")
    lost: list[str] = []

    def lose(node: str) -> None:
        call_for_node(settings.lose_node, node)
        lost.append(node)
        until(lambda: _is_ready(node) != "True", what=f"{node} is not ready", timeout_s=120, every_s=1)

    yield lose
    for node in lost:
        call_for_node(settings.restore_node, node)
        until(lambda node=node: _is_ready(node) == "True", what=f"{node} is ready", timeout_s=120, every_s=1)  # type: ignore[misc]


def _is_ready(node: str) -> str:
    return kubectl("get", "node", node, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}")


@pytest.mark.xfail(reason="without fencing the replacement is refused as long as the lost pod runs (issue 17, 1)", strict=False)
def test_the_replacement_of_a_pod_on_a_lost_node_takes_the_run_over(
    story: Story, workloads: Workloads, lose_node: Callable[[str], None]
) -> None:
    story.start(workloads.job(workloads.file_pod(STEPS=STEPS)))
    first = story.at_step(25)
    lose_node(story.namespace.watch.pods[first.pod]["spec"]["nodeName"])
    story.namespace.delete_pod(first.pod, "--force", "--grace-period=0")
    assert story.weights(timeout_s=240) == weights_after(STEPS)
    second = story.lives()[1]
    assert 25 < steps(second)[0] <= STEPS
    assert len(story.sidecars()) == 2, "the replacement's sidecar does not end"
    story.completed()
