"""One seed, one schedule: pods of a job that save several steps, die, come back and overlap, over a bad network."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import patch

from sidecar.core.lifecycle import fencing
from sidecar.daemon import phase_control
from sidecar.store.protocol import Verification
from sidecar.transfer.rate_gate import RateGate
from sidecar.upload import uploader
from sidecar.upload.early import early_upload
from sidecar.upload.send import deduplicate
from tests.simulation.audit import Violation
from tests.simulation.job import reader
from tests.simulation.job.loop import EPOCH_S, simulated_time
from tests.simulation.job.order import AttemptOrder
from tests.simulation.job.pods import Choices, Pod, Save
from tests.simulation.job.store import Ability, JobStore
from tests.simulation.job.world import Faults, Held, World
from tests.simulation.world import SLOWEST_S
from trainer_hook.contract import PINS, Node

FAULTS_END_S = 30.0
PATIENCE_S = 240.0
"""How long those are waited for that have everything to come to an end."""
LATE_S = 40.0
"""Longest time until a repeated request arrives again, in every tenth schedule: longer than the post-commit checks wait."""
DISCARDED_WITHIN_S = 2.0
"""Seconds in which what was decided last is released."""
SMALL = 8
"""Bytes from which a file is large, where the sidecar says MiB: early uploads and copies happen with files of 100 bytes."""

TOLERANCE_S = 8.0
"""Seconds by which one pod starts after another to count as later: longer than a request takes."""

SLOWER = ((phase_control, "PHASE_POLL_S", 1.0), (uploader, "REPLAN_S", 1.0), (early_upload, "POLL_S", 1.0))
"""What is looked at several times a second: most of the looks at nothing are left out."""


def _held(self: RateGate, is_held: Callable[[], bool]) -> None:
    """Simulated threads do not wait."""
    self.check()
    if is_held():
        raise Held


@contextmanager
def scaled() -> Iterator[None]:
    """Make what needs files of many MiB happen with small ones."""
    with ExitStack() as patches:
        for module, name, value in SLOWER:
            patches.enter_context(patch.object(module, name, value))
        patches.enter_context(patch.object(RateGate, "wait_while", _held))
        patches.enter_context(patch.object(fencing, "START_TOLERANCE_S", TOLERANCE_S))
        patches.enter_context(patch.object(early_upload, "LEAST_BYTES", SMALL))
        patches.enter_context(patch.object(deduplicate, "LEAST_BYTES", SMALL))
        yield


class JobSchedule:
    """One or two attempts of a job, each of up to three nodes."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        luck = self._luck = random.Random(seed * 2 + 1)
        self.seed = seed
        self.root = Path(tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm"))
        self.world = World(seed, self._faults(), tell=tell)
        self.world.faults_hid = bool(self.world.faults.hidden)
        ability = Ability(
            conditional_put=luck.random() < 0.65,
            verification=Verification.READ_BACK if luck.random() < 0.1 else Verification.STORE_CRC,
            equal_etags=luck.random() < 0.6,
        )
        self.choices = Choices(
            keep_store=luck.choice((None, 1, 2)),
            keep_local=luck.choice((1, 2)),
            skips_superseded=luck.random() < 0.3,
            part_bytes=luck.choice((40, 1 << 20)),
            job="default/train" if luck.random() < 0.7 else None,
            grace_s=luck.choice((6.0, 15.0)),
        )
        self.store = JobStore(self.world, ability, AttemptOrder(names_job=self.choices.job is not None))
        self.pods: list[Pod] = []
        self._deterministic = luck.random() < 0.3
        self._collides = luck.random() < 0.3
        self._dated = luck.random() < 0.8
        count = luck.choice((1, 1, 2, 2, 2, 3))
        self._attempt("a1", count, begins_s=0.0, resumes=False)
        if luck.random() < 0.6:
            self._second_attempt(count)

    def _faults(self) -> Faults:
        luck = self._luck
        if luck.random() < 0.2:
            return Faults()
        hidden = luck.random() * 0.3 if luck.random() < 0.15 else 0.0
        faults = Faults(luck.random() * 0.08, luck.random() * 0.08, luck.random() * 0.03, luck.random() * 0.1, hidden)
        return faults if self.seed % 10 else replace(faults, repeated=0.15, repeated_s=LATE_S)

    # What happens.

    def _attempt(self, label: str, count: int, *, begins_s: float, resumes: bool) -> None:
        luck, world = self._luck, self.world
        skew_s = luck.choice((0.0, 0.0, -3600.0, 3600.0)) if label == "a2" and self.choices.job is not None else 0.0
        stamp = datetime.fromtimestamp(EPOCH_S + begins_s + skew_s, UTC).strftime("%Y%m%dT%H%M%SZ")
        attempt = f"{stamp}-{label}" if self._dated else label
        saves = self._saves(label)
        rotates = luck.choice((None, None, 1, 2))
        pods = []
        for index in range(count):
            name = f"{label}-{index}"
            pod = Pod(world, self.store, self.root / name, name, Node(index, count), attempt, self.choices)
            pod.skew_s = skew_s
            if luck.random() < 0.1:
                cut_off_s = begins_s + luck.random() * 20
                pod.cut_off = cut_off_s, cut_off_s + luck.random() * 15
            pods.append(pod)
            pod.began_s = starts_s = begins_s + luck.random()
            if index == 0:
                self.store.attempts.begins(attempt, starts_s)
            world.at(starts_s, pod.begin)
            world.at(starts_s + 0.2, lambda pod=pod, saves=saves: pod.train(saves, resumes=resumes, rotates=rotates))  # type: ignore[misc]
            for _ in range(luck.choice((0, 0, 1, 2))):
                again_s = 0.2 + luck.random() * 4 if luck.random() < 0.9 else None
                world.at(begins_s + luck.random() * 25, pod.crash, again_s)
        self.pods += pods
        if luck.random() < 0.2:
            at_s = begins_s + luck.random() * 25
            for pod in pods:
                world.at(at_s + luck.random(), pod.terminate)

    def _saves(self, label: str) -> list[Save]:
        luck = self._luck
        per_file_s = luck.choice((0.0, 0.0, luck.random() * 2))
        at_s, saves = luck.random() * 2, []
        for number in range(luck.choice((1, 2, 3, 4))):
            again = number and luck.random() < 0.15  # the same step once more, as a second writing
            step = saves[-1].step if again else (number + 1) * 10
            save_id = f"{label}-{number}" if again or luck.random() < 0.7 else None
            seed = "same" if self._deterministic and not again else f"{label}-{number}"
            saves.append(Save(step, at_s, save_id, per_file_s, seed, luck.choice((60, 130)), self._collides))
            at_s += luck.choice((1.0, 3.0, 8.0)) * (0.5 + luck.random())
        return saves

    def _second_attempt(self, count: int) -> None:
        luck = self._luck
        begins_s = 4 + luck.random() * 20
        for pod in list(self.pods):
            chance = luck.random()
            if chance < 0.4:
                self.world.at(begins_s + luck.random() * 4 - 3, pod.kill)
            elif chance < 0.6:
                self.world.at(begins_s - 2, pod.terminate)
            # The others are zombies: nobody could reach them to end them.
        self._attempt("a2", count if luck.random() < 0.85 else luck.choice((1, 2)), begins_s=begins_s, resumes=True)

    def run(self) -> Counter[str]:
        """Let it happen, once. Returns counts of what happened.

        Raises:
            Violation: An invariant does not hold.
        """
        try:
            with simulated_time(self.world.loop), scaled():
                random.seed(self.seed)
                return self._run()
        finally:
            self._close()

    def _run(self) -> Counter[str]:
        world = self.world
        world.loop.run(FAULTS_END_S)
        world.faults = Faults()
        until_s = FAULTS_END_S
        while until_s < PATIENCE_S and not (until_s >= FAULTS_END_S + 20 and self._is_settled(until_s)):
            until_s += 10.0
            world.loop.run(until_s)
        self._check_end()
        if self._luck.random() < 0.25:
            self._check_fresh_resume()
        counts, store = world.counts, self.store
        counts.update(
            events=world.loop.events, commits=len(store.history), hits=store.hits, overtaken=store.overtaken,
            deleted=store.deleted, durable=sum(len(pod.durable) for pod in self.pods), simulated_s=int(world.now_s),
        )  # fmt: skip
        return counts

    def _is_settled(self, now_s: float) -> bool:
        """Whether all pods are done, and have had the time to release what was decided last."""
        if not all(map(self._is_over, self.pods)):
            return False
        self.world.loop.run(now_s + DISCARDED_WITHIN_S)
        return all(map(self._is_over, self.pods))

    def _is_over(self, pod: Pod) -> bool:
        is_quiet = pod.is_quiet and not (pod.trains and pod.has_saves_left)
        return not pod.is_alive or pod.is_refused or is_quiet or not self._is_whole(pod.attempt)

    def _close(self) -> None:
        self.world.loop.close()
        shutil.rmtree(self.root, ignore_errors=True)

    # What must be true once nothing happens any more.

    def _is_whole(self, attempt: str) -> bool:
        """Whether all nodes of an attempt live and none was refused."""
        pods = [pod for pod in self.pods if pod.attempt == attempt]
        return all(pod.is_alive and not pod.is_refused for pod in pods) and len(pods) == pods[0].node.count

    def _was_hit(self) -> bool:
        return bool(self.store.hits or self.store.overtaken)

    def _check_end(self) -> None:
        for life in self.store.commits.values():
            if not life.is_sound and not self._was_hit() and not self.store._is_quarantined(life.name):
                raise Violation(f"{life.name} is committed in the end, and nobody can resume from it")
        attempts = list(dict.fromkeys(pod.attempt for pod in self.pods))
        for attempt in attempts:
            if self._is_whole(attempt):
                self._check_whole(attempt, is_last=attempt == attempts[-1])
        self._check_order(attempts)
        self._check_durable(attempts)
        for pod in self.pods:
            if pod.is_alive and pod.is_quiet and not any(pod.gave_up(version.name) for version in pod.versions):
                self._check_nothing_is_left(pod)

    def _check_order(self, attempts: list[str]) -> None:
        """Of two attempts of a job, the one whose pods started later holds the prefix, and its steps are the committed ones."""
        if len(attempts) < 2 or self.choices.job is None or self.world.faults_hid:
            return
        first, last = ([pod for pod in self.pods if pod.attempt == attempt] for attempt in (attempts[0], attempts[-1]))
        began_after_s = last[0].began_s - first[0].began_s
        if began_after_s > TOLERANCE_S + 3 * SLOWEST_S and last[0].life and last[0].life.services.lease.fenced.is_set():
            raise Violation(f"{last[0].name} started {began_after_s:.1f} s after {first[0].name}, which has fenced it")
        if not self._is_whole(attempts[-1]) or self._was_hit():
            return
        for name in set.intersection(*({v.name for v in pod.versions} for pod in last)):
            life = self.store.commits.get(name)
            if life is None or life.commit.attempt == attempts[-1]:
                continue
            files = [next(v.files for v in reversed(pod.versions) if v.name == name) for pod in last]
            if all(self.store._part(life, pod.node.index) != file for pod, file in zip(last, files, strict=True)):
                raise Violation(f"{name} was written anew by {attempts[-1]}, and the commit of {life.commit.attempt} stands")

    def _check_nothing_is_left(self, pod: Pod) -> None:
        """What is decided is neither held nor remembered on the volume, and none of its uploads is unfinished in the store."""
        pins = [pin.name for pin in (pod.root / PINS).iterdir()]
        if pins:
            raise Violation(f"{pod.name} holds {pins}, of what is decided: {pod.states()}")
        uploads = [
            self.store._uploads[i].key
            for i, life in self.store.known_uploads.items()
            if life is pod.life and i in self.store._uploads
        ]
        if uploads:
            raise Violation(f"{pod.name} left unfinished uploads of {uploads}: {pod.states()}")

    def _check_whole(self, attempt: str, *, is_last: bool) -> None:
        pods = [pod for pod in self.pods if pod.attempt == attempt]
        waiting = {pod.name: pod.pending() for pod in pods if pod.pending()}
        finished = [{(v.name, v.save_id) for v in pod.versions} for pod in pods]
        by_all = set.intersection(*finished)
        stuck = {name for names in waiting.values() for name in names if any(its == name for its, _ in by_all)}
        stuck = {name for name in stuck if not self._has_rivals(name, attempt)}
        if stuck and is_last and not self._was_hit():
            raise Violation(f"{sorted(stuck)} wait for ever: {[(pod.name, pod.states()) for pod in pods]}")
        last = [pod.versions[-1] if pod.versions else None for pod in pods]
        if not is_last or None in last or len({(v.name, v.save_id) for v in last if v}) != 1 or self._was_hit():
            return
        newest = reader.newest_whole(self.store.contents)
        wanted = reader.step_of(last[0].name) if last[0] else 0
        if last[0] and self._has_rivals(last[0].name, attempt):
            return
        if newest is None or reader.step_of(newest.name) < wanted:
            states = [(pod.name, pod.states()) for pod in pods]
            raise Violation(f"{last[0]} was finished by all nodes, and latest is {newest and newest.name}: {states}")

    def _has_rivals(self, name: str, attempt: str) -> bool:
        """Whether another attempt finished a step that counts as later: two of them may make each other give way."""
        versions = [v for pod in self.pods for v in pod.versions if v.name == name]
        ours = [v for v in versions if v.attempt == attempt]
        return any(self.store.attempts.counts_as_later(v, our) for v in versions if v.attempt != attempt for our in ours)

    def _check_durable(self, attempts: list[str]) -> None:
        """What was said to be durable is there, or something newer of it is; unless a later attempt went back behind it.

        Nothing holds where nodes of one attempt continued from different steps: each rewrites what another has finished.
        """
        if self._was_hit() or any(len({p.resumed_step for p in self.pods if p.attempt == one}) > 1 for one in attempts):
            return
        newest = reader.newest_whole(self.store.contents)
        step = -1 if newest is None else reader.step_of(newest.name)
        for pod in self.pods:
            for version in pod.durable:
                rivals = [
                    p for p in self.pods if p.attempt != version.attempt and any(v.name == version.name for v in p.versions)
                ]
                resaved = (
                    sum(v.name == version.name for p in self.pods for v in p.versions if p.attempt == pod.attempt)
                    > pod.node.count
                )
                if reader.step_of(version.name) > step and not rivals and not resaved:
                    raise Violation(f"{pod.name} said {version.name} was durable, and latest is {newest and newest.name}")

    def _check_fresh_resume(self) -> None:
        """A pod that starts now resumes from what the independent reader says is the newest."""
        world = self.world
        newest = reader.newest_whole(self.store.contents)
        for pod in self.pods:
            pod.kill()
        pod = Pod(world, self.store, self.root / "fresh", "fresh-0", Node(0, 1), "fresh", self.choices)
        pod.begin()
        pod.train([], resumes=True, rotates=None)
        world.loop.run(world.now_s + 60.0)
        found = pod.resumed_step
        wanted = reader.step_of(newest.name) if newest else 0
        if found != wanted:
            raise Violation(f"a fresh pod resumes from {found}, and the newest whole step is {wanted}: {pod.states()}")
