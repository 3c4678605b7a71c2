"""Pods of a job: the loop of ``sidecar.upload.uploader`` around the sidecar's own parts, without its threads and files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sidecar.core import checksum, keys
from sidecar.core.commit import Mend, Ready, Yield
from sidecar.core.local import Finished, FoundFile
from sidecar.core.manifest import Commit, FileEntry
from sidecar.core.rewrite import Keep, Same
from sidecar.errors import StoreError
from sidecar.upload.already_there import AlreadyThere
from sidecar.upload.committing import Committer, manifest_of
from sidecar.upload.fence import Fence, Outdated
from sidecar.upload.second_looks import AFTER_S
from tests.simulation.audit import NAME, AuditedStore, Violation
from tests.simulation.world import Process, Rest, SimulatedTransfers, Sleep, World
from trainer_hook.contract import Node, epoch_seconds

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Version:
    """What the trainer of one node finished: a marker and files."""

    checkpoint: Finished
    contents: Mapping[str, bytes]


@dataclass
class Memory:
    """A journal: what of a version is in the store already."""

    entries: dict[str, FileEntry] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    """Where files lie whose name another node uses."""

    def stored(self, entry: FileEntry, *, stamp: str) -> None:
        self.entries[entry.path] = entry


def _local(method: F) -> F:
    method.is_local = True  # type: ignore[attr-defined]
    return method


class FilesOf:
    """Reads a version as ``sidecar.upload.bodies.Bodies`` reads a pin."""

    def __init__(self, version: Version) -> None:
        self._version = version

    @_local
    def checksums(self, path: str, places: Any, wanted: Any = ()) -> list[int]:
        return [checksum.checksum(self._version.contents[path])]

    @_local
    def is_still(self, path: str, places: Any, wanted: list[int]) -> bool:
        return self.checksums(path, places) == wanted


class Pod:
    """One node's sidecar and its volume, which survives a restart of the sidecar."""

    def __init__(self, world: World, store: AuditedStore, node: Node, attempt: str) -> None:
        self.world, self.store, self.node, self.attempt = world, store, node, attempt
        self.version: Version | None = None
        self.outcome: dict[str, str] = {}
        """``durable`` or why not, by version."""
        self.memories: dict[str, Memory] = {}
        self.mended: dict[str, frozenset[str]] = {}
        self.finished: list[Finished] = []
        self.process: Process | None = None
        self.lives = 0
        self.seconds_per_file = 0.0
        self.cut_off = (0.0, 0.0)
        """From when until when no request gets through."""
        self.looks: list[tuple[float, Version, bool]] = []
        """When which version is looked at again, and how."""

    def __repr__(self) -> str:
        return f"{self.attempt}/{self.node.index}"

    def begin(self, *, with_memory: bool = True) -> None:
        """Start the sidecar, or start it again."""
        self.lives += 1
        if not with_memory:
            self.memories = {}
        self.mended, self.outcome, self.looks = {}, {}, []
        self.transfers = SimulatedTransfers(self.world)
        self.committer = Committer(self.store, self.transfers, clock=self.world.clock, epoch=self.world.epoch)  # type: ignore[arg-type]
        self.already_there = AlreadyThere(
            self.committer,
            self.transfers,  # type: ignore[arg-type]
            lambda name, source: FilesOf(source),  # type: ignore[arg-type,return-value]
            is_quarantined=lambda name: False,
        )
        self.process = self.world.start(self, self._live())

    def kill(self) -> None:
        if self.process is not None:
            self.world.tell(f"{self} dies")
            self.process.kill()
            self.process = None

    def finish(self, version: Version) -> None:
        """The trainer wrote the marker."""
        self.version = version
        self.finished.append(version.checkpoint)
        self.store.contents_of.setdefault((self.attempt, version.checkpoint.save_id), {})[self.node.index] = dict(
            version.contents
        )
        self.world.tell(f"{self} finished save {version.checkpoint.save_id}")
        if self.process is not None:
            self.world.wake(self.process)

    @property
    def is_quiet(self) -> bool:
        return self.version is None or self.version.checkpoint.version in self.outcome

    def may_replace(self, commit: Commit) -> bool:
        """Whether this pod ever had something that is later than a commit, or is another save of its attempt."""
        if not commit.created_at:
            return True
        if "-" in self.attempt and commit.attempt != self.attempt:
            return self.attempt > commit.attempt
        their_s = epoch_seconds(commit.created_at)
        return any(
            (f.attempt == commit.attempt and f.save_id != commit.save_id)
            or (f.attempt != commit.attempt and f.created_at_s > their_s)
            for f in self.finished
        )

    async def _live(self) -> None:
        while True:
            version = self.version
            if version is None or version.checkpoint.version in self.outcome:
                await Rest(self.looks[0][0] if self.looks else None)
            try:
                if version is None or version.checkpoint.version in self.outcome:
                    await self._look_again()
                    continue
                await self._take_to_store(version)
            except Outdated:
                await Sleep(0.05)
            except StoreError:
                await Sleep(1.0)

    async def _look_again(self) -> None:
        """As ``Uploader._look_again``."""
        while self.looks and self.looks[0][0] <= self.world.now_s:
            _, version, thoroughly = self.looks.pop(0)
            is_durable = self.outcome.get(version.checkpoint.version) == "durable" and self._is_current(version)
            if is_durable and not await self.committer.still_stands(version.checkpoint, thoroughly=thoroughly):
                self.world.tell(f"{self} finds that save {version.checkpoint.save_id} is not durable any more")
                self.outcome.pop(version.checkpoint.version, None)

    def _is_current(self, version: Version) -> bool:
        return self.version is version

    async def _take_to_store(self, version: Version) -> None:
        """As ``Uploader._take_to_store``, line by line."""
        checkpoint, committer = version.checkpoint, self.committer
        fence = Fence(committer, NAME, self.attempt, checkpoint.save_id, clock=self.world.clock)
        there = await committer.standing(NAME)
        before = await committer.own_manifest(checkpoint)
        if there is None and await committer.withdraw_earlier(checkpoint, before):
            there = await committer.standing(NAME)
        memory = self.memories.setdefault(checkpoint.version, Memory())
        if there is not None:
            match await self.already_there.decide(checkpoint, version, there):  # type: ignore[arg-type]
                case Same():
                    committer.found_equal(checkpoint, there)
                    self._durable(version)
                    return
                case Keep(reason):
                    self._settle(version, reason)
                    return
        mended = self.mended.pop(checkpoint.version, frozenset())
        await self.already_there.adopt(checkpoint, version, memory, before, but=mended)  # type: ignore[arg-type]
        await self._send(version, memory, fence)
        if not self._is_current(version):
            return
        entries = [memory.entries[file.path] for file in checkpoint.files]
        await committer.publish_manifest(manifest_of(checkpoint, entries))
        await self._commit(version, memory)

    async def _send(self, version: Version, memory: Memory, fence: Fence) -> None:
        checkpoint = version.checkpoint
        for file in checkpoint.files:
            key, content = memory.keys.get(file.path, keys.shared_file(NAME, file.path)), version.contents[file.path]
            known = memory.entries.get(file.path)
            if known is not None and known.key == key:
                continue
            if not self._is_current(version):
                return
            await Sleep(self.seconds_per_file)
            await fence.pass_through()
            stored = await self.transfers.persistently(self.store.put, key, content, before_again=fence.pass_through)
            memory.entries[file.path] = _entry(file.path, key, content, stored.etag)

    async def _commit(self, version: Version, memory: Memory) -> None:
        checkpoint, began_s = version.checkpoint, self.world.now_s
        while self._is_current(version):
            asked_s = self.world.now_s
            decision = await self.committer.try_commit(checkpoint)
            if isinstance(decision, Ready):
                self._check_durable(version, min(asked_s, began_s))
                self._durable(version)
                return
            if isinstance(decision, Yield):
                self._settle(version, decision.reason)
                return
            if isinstance(decision, Mend):
                self.world.tell(f"{self} mends {sorted(decision.files)}: {decision.reason}")
                for path, key in decision.files.items():
                    memory.entries.pop(path, None)
                    memory.keys[path] = key
                self.mended[checkpoint.version] = frozenset(decision.files)
                return
            # The others may never come: what is always the same is looked at less often than in truth.
            await Sleep(1.0 if self.world.now_s - began_s < 8 else 4.0)

    def _check_durable(self, version: Version, since_s: float) -> None:
        key = keys.manifest(NAME, self.attempt, self.node)
        mine = [
            entry.crc64nvme
            for _, commit, removed in self.store.history
            if not removed or removed[0] >= since_s
            for entry in commit.manifests
            if entry.key == key and commit.save_id == version.checkpoint.save_id
        ]
        if not mine:
            raise Violation(f"{self} says durable, and no commit named its part since {since_s:.1f} s")

    def _durable(self, version: Version) -> None:
        self.looks = [(self.world.now_s + after_s, version, thoroughly) for after_s, thoroughly in AFTER_S]
        self._settle(version, "durable")

    def _settle(self, version: Version, outcome: str) -> None:
        self.outcome[version.checkpoint.version] = outcome
        self.world.tell(f"{self} save {version.checkpoint.save_id}: {outcome}")


@functools.lru_cache(4096)
def _entry(path: str, key: str, content: bytes, etag: str) -> FileEntry:
    crc = checksum.to_text(checksum.checksum(content))
    return FileEntry(path=path, key=key, size_bytes=len(content), crc64nvme=crc, etag=etag)


def version_of(node: Node, attempt: str, save_id: str | None, contents: Mapping[str, bytes], *, at_s: float) -> Version:
    """Return what a trainer finished at a time by its own clock."""
    files = tuple(FoundFile(path, len(content), 0, 0) for path, content in sorted(contents.items()))
    checkpoint = Finished(
        NAME, f"{attempt}-{save_id}-{node.index}", 20, None, attempt, node, at_s, None, files, {}, save_id=save_id
    )
    return Version(checkpoint, contents)
