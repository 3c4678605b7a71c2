"""A pod that takes a prefix over checks what the pod before it committed last: late requests may have damaged it since."""

from __future__ import annotations

from tests.simulation.story import told

SHARD = "checkpoint-10/shard-0"


def test_a_step_that_a_late_request_damaged_before_its_writer_ended_is_quarantined_by_the_next_pod() -> None:
    with told() as story:
        pod = story.pod("a", 0.0, saves=2)
        committed_s = story.run_until_committed("checkpoint-20")
        story.late_request(committed_s + 0.05, SHARD, b"of another pod".ljust(60, b"."))
        story.world.at(committed_s + 0.1, pod.kill)
        later = story.pod("b", committed_s + 1.0, saves=0)
        story.world.loop.run(committed_s + 10.0)
        assert later.resumed_step == 20
        assert not story.is_whole("checkpoint-10")
        assert story.store._is_quarantined("checkpoint-10")
        assert not story.store._is_quarantined("checkpoint-20")


def test_a_step_that_is_on_the_volume_is_uploaded_again_however_late_a_request_damaged_it() -> None:
    with told() as story:
        pod = story.pod("a", 0.0, saves=2)
        committed_s = story.run_until_committed("checkpoint-20")
        story.world.at(committed_s + 0.1, pod.crash, 0.5)
        story.late_request(committed_s + 20.0, SHARD, b"of another pod".ljust(60, b"."))
        story.world.loop.run(committed_s + 30.0)
        assert not story.is_whole("checkpoint-10")
        story.world.loop.run(committed_s + 80.0)
        assert story.is_whole("checkpoint-10")
        assert pod.states()["checkpoint-10"] == "committed (None)"


def test_a_step_that_a_newer_one_has_followed_at_once_is_checked_as_well() -> None:
    """The newest durable step alone was checked 5 s after its commit."""
    with told() as story:
        story.pod("a", 0.0, saves=2)
        committed_s = story.run_until_committed("checkpoint-20")
        story.late_request(committed_s + 0.05, SHARD, b"of another pod".ljust(60, b"."))
        story.world.loop.run(committed_s + 1.0)
        assert not story.is_whole("checkpoint-10")
        story.world.loop.run(committed_s + 12.0)
        assert story.is_whole("checkpoint-10")
