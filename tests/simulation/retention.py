"""Retention by several nodes (I7), while steps are damaged, hit by late requests and quarantined, and the run goes back.

The nodes run ``sidecar.retention.store_retention`` as it is. What trainers and uploaders do is one event each: a step is
committed, hit, committed anew. The store checks each deletion of a commit with its own eyes: which line is trained is known
here, and whether a commit is whole is looked up in the store.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.catalog.events import Events
from sidecar.core.commit.commit import commit_of, manifest_entry
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import FileEntry, Manifest, NodeOf, Quarantined, decode_commit, decode_manifest, encode
from sidecar.errors import StoreError
from sidecar.retention import store_retention
from sidecar.retention.known_steps import KnownSteps
from sidecar.retention.store_retention import StoreRetention
from sidecar.store.protocol import Stored
from sidecar.transfer.clock import Clock
from sidecar.upload.commit.post_commit_check import AFTER_S
from tests.simulation.audit import Violation
from tests.simulation.world import EPOCH_S, Faults, Process, SimulatedExecutor, Sleep, World
from tests.store.memory import MemoryStore
from trainer_hook.contract import META_RESUMED_FROM, rfc3339, step_of

SETTLED_S = store_retention.SETTLED_S
"""As it is, also where a test changes it there."""
FLIGHT_S = 60.0
"""Longest time from a node's last look to the arrival of its deletion, with all that is lost and tried again."""
END_S = 150.0
QUIET_S = 90.0


@dataclass
class Writing:
    """A commit of a step, from when it was written until it was removed."""

    name: str
    crc: str
    since_s: float
    is_sound: bool = True
    until_s: float = 0.0
    """When it was sound last, if it is not now."""
    stands: bool = True

    def was_seen_whole(self, now_s: float) -> bool:
        """Whether a node that deletes something now may have found it whole after it had settled."""
        last_s = now_s if self.is_sound else self.until_s
        return last_s >= max(self.since_s + SETTLED_S, now_s - FLIGHT_S)


@dataclass
class KeptStore(MemoryStore):
    """A store in memory that knows the line that is trained, and looks at each deletion."""

    world: World
    keep: int
    line: set[int] = field(default_factory=set)
    lines: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    """Each line with the time since when it is the present one."""
    writings: list[Writing] = field(default_factory=list)
    deleted: int = 0
    written_s: dict[str, float] = field(default_factory=dict)
    """When each object was written, by key."""

    def __post_init__(self) -> None:
        MemoryStore.__init__(self)

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        stored = super().put(key, content, only_if_absent=only_if_absent)
        self.written_s[key] = self.world.now_s
        name = key.partition("/")[0]
        self.world.tell(f"{self.world.acting} put {key}")
        if key == keys.commit(name):
            self.writings.append(Writing(name, checksum.text_of(content), self.world.now_s))
        self._look_at(name)
        return stored

    def list(self, prefix: str) -> Iterator[Stored]:
        return (replace(stored, modified=f"{self.written_s[stored.key]:09.3f}") for stored in super().list(prefix))

    def delete(self, keys_: Iterable[str]) -> None:
        for key in keys_:
            name = key.partition("/")[0]
            if key not in self._objects:
                continue
            self.world.tell(f"{self.world.acting} delete {key}")
            if key == keys.commit(name):
                if isinstance(self.world.acting, Node):
                    self._check(name)
                    self.deleted += 1
                for writing in self.stored_commit(name):
                    writing.until_s = self.world.now_s if writing.is_sound else writing.until_s
                    writing.is_sound = writing.stands = False
            super().delete([key])
            self._look_at(name)

    def trains(self, line: set[int]) -> None:
        self.line = line
        self.lines.append((self.world.now_s, frozenset(line)))

    def stored_commit(self, name: str) -> list[Writing]:
        return [writing for writing in self.writings if writing.name == name and writing.stands]

    def committed(self) -> list[Writing]:
        return [writing for writing in self.writings if writing.stands]

    def _look_at(self, name: str) -> None:
        for writing in self.stored_commit(name):
            is_sound = self._is_sound(writing)
            if writing.is_sound and not is_sound:
                writing.until_s = self.world.now_s
            writing.is_sound = is_sound

    def _is_sound(self, writing: Writing) -> bool:
        if keys.quarantined(writing.name, writing.crc) in self._objects:
            return False
        commit = decode_commit(self._objects[keys.commit(writing.name)].content, key=keys.commit(writing.name))
        for entry in commit.manifests:
            document = self._objects.get(entry.key)
            if document is None or checksum.text_of(document.content) != entry.crc64nvme:
                return False
            for file in decode_manifest(document.content, key=entry.key).files:
                there = self._objects.get(file.key)
                if there is None or (len(there.content), there.etag) != (file.size_bytes, file.etag):
                    return False
        return True

    # I7.

    def _check(self, name: str) -> None:
        now_s, step = self.world.now_s, step_of(name) or 0
        before = [line for at_s, line in self.lines if at_s <= now_s - FLIGHT_S][-1:]
        lines = before + [line for at_s, line in self.lines if at_s > now_s - FLIGHT_S]
        counts = []
        for line in lines:
            newer = {
                writing.name
                for writing in self.writings
                if (other := step_of(writing.name) or 0) > step and other in line and writing.was_seen_whole(now_s)
            }
            counts.append(len(newer))
        if max(counts, default=0) < self.keep:
            raise Violation(
                f"I7: {self.world.acting} deleted {name}, and {counts} of {self.keep} newer ones were whole: {self.lines[-1]}"
            )

    def check_end(self) -> None:
        """What may go is gone, and of what is gone nothing is left."""
        now_s = self.world.now_s
        committed = {writing.name for writing in self.committed()}
        if left := sorted(key for key in self._objects if key.partition("/")[0] not in committed):
            raise Violation(f"a deletion was not finished: {left}")
        sound = [
            w for w in self.committed() if w.is_sound and w.since_s + SETTLED_S < now_s - 60 and step_of(w.name) in self.line
        ]
        newest = sorted(sound, key=_step)[-self.keep :]
        if any(_step(w) > _step(newest[-1]) for w in self.committed() if newest and not w.is_sound):
            return  # the newest one was damaged after the last look: what it let go is looked at with the next commit
        for writing in self.committed():
            # What was committed anew after them stays until something newer is there.
            newer = [w for w in newest if w.since_s > writing.since_s and _step(w) > _step(writing)]
            if len(newer) == self.keep:
                raise Violation(
                    f"{writing.name} still stands, although {[w.name for w in newer]} are whole, of {self.keep} to keep"
                )


def _step(writing: Writing) -> int:
    return step_of(writing.name) or 0


class NothingPending(KnownSteps):
    """Of a node that sends nothing."""

    def is_pending(self, name: str) -> bool:
        return False


class Node:
    """One node's retention."""

    def __init__(self, world: World, store: KeptStore, index: int) -> None:
        self.world, self.store, self.index = world, store, index
        self.cut_off = (0.0, 0.0)
        self.process: Process | None = None

    def __repr__(self) -> str:
        return f"node {self.index}"

    def begin(self) -> None:
        self.retention = StoreRetention(
            self.store,
            SimulatedExecutor(self.world),  # type: ignore[arg-type]
            keep_newest=self.store.keep,
            keep_every_steps=None,
            known=NothingPending(),
            events=Events(),
            clock=Clock(monotonic=self.world.clock),
        )
        self.process = self.world.start(self, self._live())

    async def _live(self) -> None:
        while True:
            try:
                again_s = await self.retention.run_once()
            except StoreError:
                again_s = 1.0
            await Sleep(min(4.0, 4.0 if again_s is None else again_s + 0.01))

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None


class RetentionSchedule:
    """A run of a few attempts, one seed one schedule."""

    def __init__(self, seed: int, *, tell: bool = False) -> None:
        luck = self._luck = random.Random(seed * 2 + 1)
        self.world = World(seed, Faults(luck.random() * 0.05, luck.random() * 0.05, 0.02, luck.random() * 0.1))
        if tell:
            self.world.story = []
        self.store = KeptStore(self.world, luck.choice((1, 1, 2, 3)))
        self.nodes = [Node(self.world, self.store, index) for index in range(luck.choice((1, 2, 2, 3)))]
        self._tells_origin = luck.random() < 0.5
        self._attempts = 0
        self._written_by: dict[int, str] = {}
        for node in self.nodes:
            self.world.at(luck.random() * 5, node.begin)
            if luck.random() < 0.5:
                self.world.at(luck.random() * END_S, self._restart, node)
        self.world.at(0.0, self._attempt, None)

    def run(self) -> dict[str, int]:
        """Let it happen, once.

        Raises:
            Violation: I7 does not hold, or what may go does not.
        """
        world = self.world
        try:
            world.run(END_S)
            world.faults = Faults()
            world.run(END_S + QUIET_S)
            self.store.check_end()
            return {"commits": len(self.store.writings), "deleted": self.store.deleted, "attempts": self._attempts}
        finally:
            world.close()
            for node in self.nodes:
                node.end()

    def _restart(self, node: Node) -> None:
        node.end()
        self.world.at(self.world.now_s + self._luck.random() * 5, node.begin)

    def _attempt(self, origin: int | None) -> None:
        """Train from a step on, then go on from there, or from an older one."""
        luck, world, began_s = self._luck, self.world, self.world.now_s
        self._attempts += 1
        attempt = f"20270115T08{self._attempts:02}00Z-a{self._attempts}"
        # Until it commits something, nothing in the store tells that the run went back.
        first = (origin or 0) + luck.choice((10, 20, 50))
        # Where nothing tells from where, what lies below its first step may belong to it as well.
        below = first if not self._tells_origin else (origin or 0) + 1
        line = {step for step in self.store.line if step < below}
        meta = {}
        if origin is not None and self._tells_origin:
            meta[META_RESUMED_FROM] = {"step": origin, "attempt": self._written_by[origin]}
        step = first
        for _ in range(luck.randint(1, 6)):
            began_s += luck.uniform(2, 20)
            if began_s > END_S - 20:
                return
            line = line | {step}
            world.at(began_s, self._commit, step, attempt, dict(meta), line)
            step += luck.choice((10, 10, 20, 50))
        world.at(began_s + luck.random() * 20, self._resume)

    def _resume(self) -> None:
        """A pod of the next attempt resumes from the newest usable step, or by name from an older one."""
        if self.world.now_s > END_S - 20:
            return
        there = sorted((w for w in self.store.committed() if step_of(w.name) in self.store.line), key=_step, reverse=True)
        usable = [writing for writing in there if writing.is_sound]
        if not usable:
            self._attempt(None)
            return
        chosen = usable[0] if self._luck.random() < 0.5 else self._luck.choice(usable)
        self._attempt(_step(chosen))

    def _commit(self, step: int, attempt: str, meta: dict[str, Any], line: set[int], finished_s: float | None = None) -> None:
        """All nodes sent what the trainer had finished, or send it again."""
        name, store, at_s = f"checkpoint-{step}", self.store, self.world.now_s
        finished_s = at_s if finished_s is None else finished_s
        store.delete([keys.commit(name)])
        manifests, raw = [], {}
        for index in range(2):
            key = keys.shared_file(name, f"part-{index}")
            content = f"{attempt} {step} {index} {at_s}".encode()
            entry = FileEntry(
                path=f"part-{index}",
                key=key,
                size_bytes=len(content),
                crc64nvme=checksum.text_of(content),
                etag=store.put(key, content).etag,
            )
            manifest = Manifest(
                name=name,
                step=step,
                attempt=attempt,
                node=NodeOf(index=index, count=2),
                created_at=rfc3339(EPOCH_S + finished_s),
                meta=meta,
                files=(entry,),
            )
            manifests.append(manifest)
            raw[index] = encode(manifest)
            store.put(manifest_entry(manifest, raw[index]).key, raw[index])
        self._written_by[step] = attempt
        store.put(keys.commit(name), encode(commit_of(manifests, raw, committed_at=rfc3339(EPOCH_S + at_s))))
        store.trains(line)
        self._happens_to(name, lambda: self._commit(step, attempt, meta, store.line, finished_s))

    def _happens_to(self, name: str, again: Any) -> None:
        luck, world, now_s = self._luck, self.world, self.world.now_s
        [writing] = self.store.stored_commit(name)
        if luck.random() < 0.3:  # a late request of an attempt that was replaced
            world.at(now_s + luck.random() * AFTER_S[-1][0], self._hit, writing)
            if luck.random() < 0.6:  # and the writer lives, and looks again
                world.at(now_s + AFTER_S[-1][0], lambda: None if writing.is_sound or not writing.stands else again())
        elif luck.random() < 0.1:
            world.at(now_s + luck.random() * 60, self._hit, writing)
        elif luck.random() < 0.1:  # its bytes are others, which no listing shows: some node finds out when it resumes
            world.at(now_s + luck.random() * AFTER_S[-1][0], self._quarantine, writing)

    def _hit(self, writing: Writing) -> None:
        key = keys.shared_file(writing.name, f"part-{self._luck.randint(0, 1)}")
        if writing.stands and self._luck.random() < 0.7:
            self.store.put(key, b"of another attempt")
        elif writing.stands:
            self.store.delete([key])

    def _quarantine(self, writing: Writing) -> None:
        if writing.stands:
            document = Quarantined(commit_crc64nvme=writing.crc, reason="its bytes are others")
            self.store.put(keys.quarantined(writing.name, writing.crc), encode(document))
