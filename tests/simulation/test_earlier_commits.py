"""A pod that takes a prefix over checks what the pod before it committed last: late requests may have damaged it since."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.simulation.job.loop import simulated_time
from tests.simulation.job.order import AttemptOrder
from tests.simulation.job.pods import Choices, Pod, Save
from tests.simulation.job.schedule import scaled
from tests.simulation.job.store import Ability, JobStore
from tests.simulation.job.world import Faults, World
from tests.simulation.run import quiet
from trainer_hook.contract import Node

SHARD = "checkpoint-10/shard-0"


class Story:
    """Pods of one job, one after the other, of which each saves steps 10 and 20 after the step that it resumes from."""

    def __init__(self, root: Path) -> None:
        self.world = World(1, Faults(), tell=True)
        self.store = JobStore(self.world, Ability(), AttemptOrder(names_job=True))
        self._root = root

    def pod(self, name: str, at_s: float, *, saves: int) -> Pod:
        attempt = f"20270115T0800{round(at_s):02}Z-{name}"
        pod = Pod(self.world, self.store, self._root / name, name, Node(0, 1), attempt, Choices())
        pod.began_s = at_s
        self.store.attempts.begins(attempt, at_s)
        written = [Save(10 * number, float(number), None, 0.0, name, 60, False) for number in range(1, saves + 1)]
        self.world.at(at_s, pod.begin)
        self.world.at(at_s + 0.2, lambda: pod.train(written, resumes=True, rotates=None))
        return pod

    def late_request(self, at_s: float, content: bytes) -> None:
        """Let a request of a pod that is gone arrive: a PUT without a condition."""

        def arrive() -> None:
            self.world.is_stray = True
            self.store.put(SHARD, content)
            self.world.is_stray = False

        self.world.at(at_s, arrive)

    def run_until_committed(self, name: str) -> float:
        """Let time pass until a step is committed, and return it in seconds."""
        while name not in self.store.commits:
            assert self.world.now_s < 30.0, self.world.story
            self.world.loop.run(self.world.now_s + 0.1)
        return self.world.now_s

    def is_whole(self, name: str) -> bool:
        return self.store.commits[name].is_sound


@contextmanager
def told() -> Iterator[Story]:
    root = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm"))
    story = Story(root)
    try:
        with simulated_time(story.world.loop), scaled(), quiet():
            random.seed(1)
            yield story
    finally:
        story.world.loop.close()
        shutil.rmtree(root, ignore_errors=True)


def test_a_step_that_a_late_request_damaged_before_its_writer_ended_is_quarantined_by_the_next_pod() -> None:
    with told() as story:
        pod = story.pod("a", 0.0, saves=2)
        committed_s = story.run_until_committed("checkpoint-20")
        story.late_request(committed_s + 0.05, b"of another pod".ljust(60, b"."))
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
        story.late_request(committed_s + 20.0, b"of another pod".ljust(60, b"."))
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
        story.late_request(committed_s + 0.05, b"of another pod".ljust(60, b"."))
        story.world.loop.run(committed_s + 1.0)
        assert not story.is_whole("checkpoint-10")
        story.world.loop.run(committed_s + 12.0)
        assert story.is_whole("checkpoint-10")
