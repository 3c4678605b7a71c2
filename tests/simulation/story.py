"""A life of a job that is told, not drawn: pods whose times are given, with the production daemon, on simulated time."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from tests.simulation.job.loop import EPOCH_S, simulated_time
from tests.simulation.job.order import AttemptOrder
from tests.simulation.job.pods import Choices, Pod, Save
from tests.simulation.job.schedule import scaled
from tests.simulation.job.store import Ability, JobStore
from tests.simulation.job.world import Faults, World
from tests.simulation.run import quiet
from trainer_hook.contract import Node


class Story:
    """Pods of one job, one after the other, of which each saves steps 10 and 20 after the step that it resumes from, if any."""

    def __init__(self, root: Path) -> None:
        self.world = World(1, Faults(), tell=True)
        self.store = JobStore(self.world, Ability(), AttemptOrder(names_job=True))
        self._root = root

    def pod(self, name: str, at_s: float, *, saves: int, resumes: bool = True, skew_s: float = 0.0) -> Pod:
        """Add a pod whose clock is wrong by ``skew_s`` seconds."""
        attempt = f"{datetime.fromtimestamp(EPOCH_S + at_s + skew_s, UTC):%Y%m%dT%H%M%SZ}-{name}"
        pod = Pod(self.world, self.store, self._root / name, name, Node(0, 1), attempt, Choices())
        pod.began_s, pod.skew_s = at_s, skew_s
        self.store.attempts.begins(attempt, at_s)
        written = [Save(10 * number, float(number), None, 0.0, name, 60, False) for number in range(1, saves + 1)]
        self.world.at(at_s, pod.begin)
        self.world.at(at_s + 0.2, lambda: pod.train(written, resumes=resumes, rotates=None))
        return pod

    def late_request(self, at_s: float, key: str, content: bytes) -> None:
        """Let a request of a pod that is gone arrive: a PUT without a condition."""

        def arrive() -> None:
            self.world.is_stray = True
            self.store.put(key, content)
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
