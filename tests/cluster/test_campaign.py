"""Pods deleted, drained and lost at random moments. A node is cut off, which disturbs other tests: run alone.

``CKPT_CLUSTER_SEEDS=1:20`` plays more seeds than one.
"""

from __future__ import annotations

import pytest

from tests.campaign.reader import Bucket, Reader
from tests.cluster.campaign import Campaign, plan, seeds
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story

pytestmark = [pytest.mark.disruptive, pytest.mark.timeout(600)]


@pytest.mark.parametrize("seed", seeds())
def test_a_job_of_several_nodes_survives_what_a_seed_does_to_its_pods(
    story: Story, settings: ClusterSettings, two_nodes: list[str], seed: int
) -> None:
    keys = (settings.access_key, settings.secret_key)
    reader = Reader(Bucket(settings.endpoint, settings.bucket, f"{story.namespace.name}/run", keys=keys))
    played = Campaign(story, settings, reader, plan(seed, may_lose_nodes=bool(settings.lose_node and settings.restore_node)))
    played.play()
    print("\n".join(played.notes))
