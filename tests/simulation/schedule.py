"""One seed, one schedule: who writes what and when, who dies and comes back, and what must be true in the end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.audit import AuditedStore, Violation
from tests.simulation.pods import Pod, Version, version_of
from tests.simulation.world import EPOCH_S, Faults, World
from trainer_hook.contract import Node

FAULTS_END_S = 24.0
END_S = 48.0
PATIENCE_S = 150.0
"""How long those are waited for that have everything to come to an end."""


LET_GO_S = 20.0
"""Time in which a sidecar drops the journal of a version that was written anew."""


@dataclass
class Outcome:
    """What came of a schedule, for the statistics."""

    events: int
    commits: int
    overtaken: int
    hits: int
    resumable: bool


class Schedule:
    """Of up to two attempts at one step, each by up to three nodes."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        luck = self._luck = random.Random(seed * 2 + 1)
        calm = luck.random() < 0.2
        faults = (
            Faults() if calm else Faults(luck.random() * 0.1, luck.random() * 0.1, luck.random() * 0.04, luck.random() * 0.1)
        )
        self.world = World(seed, faults)
        if tell:
            self.world.story = []
        self.store = AuditedStore(self.world, {}, equal_etags=luck.random() < 0.6)
        self.pods: list[Pod] = []
        self._deterministic = luck.random() < 0.3
        """Whether all writings have the same content, as a deterministic training that is repeated."""
        self._collides = luck.random() < 0.4
        count = luck.choice((1, 2, 2, 2, 3))
        self._dated = luck.random() < 0.7
        """Whether the ids of attempts say when they began."""
        self._attempt("a1", count, begins_s=0.0)
        if luck.random() < 0.6:
            self._second_attempt(count)

    def run(self) -> Outcome:
        """Let it happen, once.

        Raises:
            Violation: An invariant does not hold.
        """
        try:
            return self._run()
        finally:
            self._close()

    def _close(self) -> None:
        """Cut what refers to each other: so it is freed at once, and need not be looked for."""
        self.world.close()
        self.store.close()
        for pod in self.pods:
            pod.close()

    def _run(self) -> Outcome:
        world = self.world
        world.run(FAULTS_END_S)
        world.faults = Faults()
        until_s = FAULTS_END_S
        while until_s < END_S or (until_s < PATIENCE_S and self._somebody_should_end()):
            until_s += 12.0
            world.run(until_s)
            if all(pod.is_quiet for pod in self.pods if pod.process is not None):
                world.run(until_s + 4.0)  # what is still on its way
                break
        self._check_end()
        return Outcome(
            world.events, len(self.store.history), self.store.overtaken, self.store.hits, self.store.resume() is not None
        )

    def _somebody_should_end(self) -> bool:
        attempts = ([p for p in self.pods if p.attempt == a and p.process] for a in {p.attempt for p in self.pods})
        return any(self._is_whole(pods, pods[0].attempt) and not all(p.is_quiet for p in pods) for pods in attempts if pods)

    def _attempt(self, attempt: str, count: int, *, begins_s: float) -> None:
        luck = self._luck
        attempt = f"20270115T0800{round(begins_s):02}Z-{attempt}" if self._dated else attempt
        pods = [Pod(self.world, self.store, Node(index, count), attempt) for index in range(count)]
        self.pods += pods
        saves: list[tuple[str | None, float]] = [("1", begins_s + luck.random() * 3)]
        if luck.random() < 0.4:
            saves.append(("2", saves[0][1] + luck.random() * 7))
        for pod in pods:
            pod.seconds_per_file = luck.choice((0.0, 0.0, 0.0, luck.random() * 3))
            if luck.random() < 0.1:
                cut_off_s = begins_s + luck.random() * 8
                pod.cut_off = cut_off_s, cut_off_s + luck.random() * 8
            skew_s = luck.choice((0.0, 0.0, luck.uniform(-1, 1)))
            self.world.at(begins_s, pod.begin)
            for save_id, at_s in saves:
                if luck.random() < 0.95:
                    self._finishes(pod, save_id, at_s + luck.random() * 2, skew_s)
            for _ in range(luck.choice((0, 0, 1, 2))):
                self._crashes(pod, begins_s + luck.random() * 10)

    def _second_attempt(self, count: int) -> None:
        luck = self._luck
        begins_s = 1 + luck.random() * 11
        for pod in list(self.pods):
            if luck.random() < 0.6:  # the others are zombies: nobody could reach them to end them
                self.world.at(begins_s, lambda pod=pod: self._ends(pod))  # type: ignore[misc]
        self._attempt("a2", count if luck.random() < 0.85 else luck.choice((1, 2, 3)), begins_s=begins_s)

    def _finishes(self, pod: Pod, save_id: str | None, at_s: float, skew_s: float) -> None:
        def finish() -> None:
            if pod.lives:
                pod.finish(version)

        version = version_of(
            pod.node, pod.attempt, save_id, self._contents(pod, save_id), at_s=EPOCH_S + round(at_s + skew_s, 3)
        )
        self.world.at(at_s, finish)

    def _contents(self, pod: Pod, save_id: str | None) -> dict[str, bytes]:
        of = "same" if self._deterministic else f"{pod.attempt}-{save_id}"
        contents = {f"shard-{pod.node.index}": f"{of}-{pod.node.index}".encode(), "config": b"{}"}
        if self._collides:
            contents["rng"] = f"{of} of {pod.node.index}".encode()
        return contents

    def _crashes(self, pod: Pod, at_s: float) -> None:
        luck = self._luck
        again_s = at_s + 0.2 + luck.random() * 4 if luck.random() < 0.85 else None
        with_memory = luck.random() < 0.7

        def crash() -> None:
            if pod.process is not None:
                pod.kill()
                if again_s is not None:
                    self.world.at(again_s, again)

        def again() -> None:
            if pod.lives and pod.process is None:
                self.world.tell(f"{pod} starts again")
                pod.begin(with_memory=with_memory)

        self.world.at(at_s, crash)

    def _ends(self, pod: Pod) -> None:
        pod.kill()
        pod.lives = 0  # and does not come back

    # What must be true once nothing happens any more.

    def _check_end(self) -> None:
        store = self.store
        alive = [pod for pod in self.pods if pod.process is not None]
        stored_commit = store.stored_commit
        if stored_commit is not None and not stored_commit.sound and not self._was_hit():
            raise Violation("a commit stands in the end that nobody can resume from")
        if stored_commit is not None and not stored_commit.sound and stored_commit.must_be_repaired:
            raise Violation(f"a commit was damaged {stored_commit.hit_s} s, and its writer did not repair it")
        for pod in alive:
            if pod.version is not None and self.world.now_s - pod.replaced_s > LET_GO_S and pod.replaced:
                raise Violation(f"{pod} does not let go of {pod.replaced}, which was written anew at {pod.replaced_s:.1f} s")
        for attempt in {pod.attempt for pod in self.pods}:
            pods = [pod for pod in alive if pod.attempt == attempt]
            if self._is_whole(pods, attempt):
                self._check_whole(pods)

    def _was_hit(self) -> bool:
        """Whether a request that nobody could withdraw in time hit what was committed."""
        return bool(self.store.hits or self.store.overtaken)

    def _is_whole(self, pods: list[Pod], attempt: str) -> bool:
        """Whether all nodes of an attempt live and have finished the same save last."""
        everybody = [pod for pod in self.pods if pod.attempt == attempt]
        saves = {pod.version.checkpoint.save_id if pod.version else None for pod in pods}
        return len(pods) == len(everybody) == pods[0].node.count and len(saves) == 1 and None not in saves if pods else False

    def _check_whole(self, pods: list[Pod]) -> None:
        waiting = [pod for pod in pods if not pod.is_quiet]
        outcomes = {str(pod): pod.outcome for pod in pods}
        if waiting and not self._has_rivals(pods) and not self._was_hit():
            raise Violation(f"{waiting} would wait for ever; {outcomes}")
        durable = [pod for pod in pods if outcomes[str(pod)] == "durable"]
        if len(durable) not in (0, len(pods)) and not self._has_rivals(pods) and not self._was_hit():
            raise Violation(f"some nodes say durable, some do not: {outcomes}")
        lost = self.store.resume() is None and not self._has_rivals(pods)
        if durable and lost and not self._was_hit():
            raise Violation(f"{durable} say durable, and nothing can be resumed")

    def _version(self, pod: Pod) -> Version:
        assert pod.version is not None
        return pod.version

    def _has_rivals(self, pods: list[Pod]) -> bool:
        """Whether another attempt finished the step later: what was durable for some is superseded for others."""
        if self._dated:
            return any(pod.attempt > pods[0].attempt and pod.finished for pod in self.pods)
        others = [f for pod in self.pods if pod.attempt != pods[0].attempt for f in pod.finished]
        ours_s = min(self._version(pod).checkpoint.created_at_s for pod in pods)
        return any(other.created_at_s > ours_s for other in others)
