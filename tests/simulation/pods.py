"""Pods of a job: the sidecar's own ``Uploader`` without its threads and files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.core.commit.commit import Decision, ReadyToCommit
from sidecar.core.format import checksum, keys
from sidecar.core.format.found_checkpoint import Finished, FoundFile
from sidecar.core.format.manifest import Commit, FileEntry
from sidecar.core.lifecycle.states import PENDING, State
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.lease import NoLease
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.context import Clock, StoreLimits, UploadContext
from sidecar.upload.early.handover import Handover
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.schedule.queue import Active
from sidecar.upload.schedule.retry_waits import RetryWaits
from sidecar.upload.send.journal import Journal
from sidecar.upload.uploader import Uploader
from sidecar.upload.versions import Held, Sent
from tests.simulation.audit import NAME, AuditedStore, Violation
from tests.simulation.world import Event, Process, SimulatedExecutor, Sleep, World
from trainer_hook.contract import Node, epoch_seconds

F = TypeVar("F", bound=Callable[..., Any])
QUIET_AFTER_S = 8.0
"""Seconds without a change after which the pod looks less often."""


@dataclass(frozen=True)
class Version:
    """What the trainer of one node finished: a marker and files."""

    checkpoint: Finished
    contents: Mapping[str, bytes]


class Memory(Journal):
    """A journal without a file: what of a version is in the store already."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def _read(self) -> None:
        pass

    def _write(self, *lines: Any, takes_back: bool) -> bool:
        return True


class FilesOf:
    """Reads a version as ``sidecar.upload.send.payloads.Payloads`` reads a pin."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def checksums(self, path: str, ranges: Any) -> list[int]:
        return [checksum.checksum(self._version.contents[path])]

    def is_still(self, path: str, ranges: Any, wanted: list[int]) -> bool:
        return self.checksums(path, ranges) == wanted


class Staying(NoLease):
    """The surroundings of the uploads: the pod stays, may write, and found nothing damaged at a resume."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt

    def reason(self, name: str, crc: str) -> str | None:
        return None

    def trainer_alive(self) -> bool:
        return True

    def attempt(self) -> str:
        return self._attempt


class NothingEarly:
    """``EarlyUploads`` of a trainer whose files are not seen before their marker."""

    def transfers(self) -> list[Any]:
        return []


class SimulatedCatalog(Catalog):
    """Wakes its waiters on the world's clock, and tells the story."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(Events())
        self._pod = pod
        self._news = Event(pod.world)

    async def changed(self) -> None:
        await self._news.wait()

    def _tell(self, tracked: Tracked, **fields: Any) -> None:
        self._pod.changed_s = self._pod.world.now_s
        self._pod.world.tell(f"{self._pod} {tracked.version}: {tracked.state.value}, {tracked.reason}")
        super()._tell(tracked, **fields)

    def _wake(self) -> None:
        self._news.set()
        self._news = Event(self._pod.world)


class SimulatedVersions:
    """``sidecar.upload.versions.Versions`` in memory. Files are sent one after the other."""

    def __init__(
        self, context: UploadContext, versions: Mapping[str, Version], memories: dict[str, Memory], seconds_per_file: float
    ) -> None:
        self._context = context
        self._versions = versions
        self._memories = memories
        self._seconds_per_file = seconds_per_file

    async def hold(self, checkpoint: Finished) -> Held:
        files = FilesOf(self._versions[checkpoint.version])
        return Held(files, files)  # type: ignore[arg-type]

    def taken_over(self, active: Active, checkpoint: Finished) -> AbstractAsyncContextManager[Sent]:
        return nullcontext(Sent(self._memory(checkpoint), Handover(Memory())))

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        context, contents = self._context, self._versions[checkpoint.version].contents
        context.catalog.move(active.tracked, State.UPLOADING)
        moved, entries = context.reuploads.moved(checkpoint.version), sent.journal.entries
        for file in checkpoint.files:
            if file.path in entries:
                continue
            if not context.catalog.is_current(active.tracked):
                break
            key, content = moved.get(file.path, keys.shared_file(NAME, file.path)), contents[file.path]
            await Sleep(self._seconds_per_file)
            await guard.pass_through()
            stored = await context.executor.persistently(context.store.put, key, content, before_again=guard.pass_through)
            sent.journal.stored(_entry(file.path, key, content, stored.etag), stamp=file.stamp)
        active.is_sent = True
        return [entries[file.path] for file in checkpoint.files if file.path in entries]

    async def journal(self, checkpoint: Finished) -> Journal:
        return self._memory(checkpoint)

    def let_go(self, checkpoint: Finished) -> None:
        self._memories.pop(checkpoint.version, None)

    def has_no_marker(self, name: str) -> bool:
        return False

    def examine_again(self, name: str) -> None:
        raise Violation(f"{name} was found to have changed on disk, and nothing changes there")

    def _memory(self, checkpoint: Finished) -> Memory:
        return self._memories.setdefault(checkpoint.version, Memory())


class AuditedCommitter(Committer):
    """Does not take the sidecar's word for it that a node's part is committed."""

    def __init__(self, store: AuditedStore, executor: SimulatedExecutor, world: World) -> None:
        super().__init__(store, executor, clock=Clock(world.clock, world.epoch, Sleep))  # type: ignore[arg-type]
        self._audited = store
        self._asked_s: dict[str, float] = {}
        """When a version's manifest was there first, by version."""

    async def try_commit(self, checkpoint: Finished, *, poll_s: float | None = None) -> Decision:
        since_s = self._asked_s.setdefault(checkpoint.version, self._clock.monotonic())
        decision = await super().try_commit(checkpoint, poll_s=poll_s)
        if isinstance(decision, ReadyToCommit):
            self._check_durable(checkpoint, since_s)
        return decision

    def _check_durable(self, checkpoint: Finished, since_s: float) -> None:
        key = keys.manifest(NAME, checkpoint.attempt, checkpoint.node)
        mine = [
            entry.crc64nvme
            for _, commit, removed in self._audited.history
            if not removed or removed[0] >= since_s
            for entry in commit.manifests
            if entry.key == key and commit.save_id == checkpoint.save_id
        ]
        if not mine:
            raise Violation(f"{checkpoint.version} is said to be durable, and no commit named it since {since_s:.1f} s")


class Pod:
    """One node's sidecar and its volume, which survives a restart of the sidecar."""

    def __init__(self, world: World, store: AuditedStore, node: Node, attempt: str) -> None:
        self.world, self.store, self.node, self.attempt = world, store, node, attempt
        self.version: Version | None = None
        self.versions: dict[str, Version] = {}
        self.memories: dict[str, Memory] = {}
        self.finished: list[Finished] = []
        self.process: Process | None = None
        self.tasks: list[Process] = []
        """Processes that the sidecar started beside its main one."""
        self.catalog = Catalog(Events())
        self.changed_s = 0.0
        """When a state in the catalog changed last."""
        self.replaced_s = 0.0
        """When the trainer finished its latest version."""
        self.lives = 0
        self.seconds_per_file = 0.0
        self.cut_off = (0.0, 0.0)
        """From when until when no request gets through."""

    def __repr__(self) -> str:
        return f"{self.attempt}/{self.node.index}"

    def begin(self, *, with_memory: bool = True) -> None:
        """Start the sidecar, or start it again."""
        self.lives += 1
        current = self.version.checkpoint.version if self.version is not None and with_memory else None
        self.memories = {version: memory for version, memory in self.memories.items() if version == current}
        self.catalog = SimulatedCatalog(self)
        if self.version is not None:
            self.catalog.finished(self.version.checkpoint, held=True)
        context = self._context()
        versions = SimulatedVersions(context, self.versions, self.memories, self.seconds_per_file)
        uploader = Uploader(context, versions, NothingEarly(), skip_superseded=False)  # type: ignore[arg-type]
        self.process = self.world.start(self, uploader.upload(self))

    def create_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine that dies with the sidecar."""
        self.tasks = [task for task in self.tasks if task.is_alive]
        self.tasks.append(self.world.start(self, work))

    async def _sleep(self, for_s: float) -> None:
        # Others may never come: what is always the same is looked at less often than in truth.
        await Sleep(for_s if self.world.now_s - self.changed_s < QUIET_AFTER_S else 4 * for_s)

    def _context(self) -> UploadContext:
        world, around, executor = self.world, Staying(self.attempt), SimulatedExecutor(self.world)
        return UploadContext(
            store=self.store,  # type: ignore[arg-type]
            limits=StoreLimits(self.store.probe()),
            executor=executor,  # type: ignore[arg-type]
            committer=AuditedCommitter(self.store, executor, world),
            catalog=self.catalog,
            flush=FlushControl(executor, Events()),  # type: ignore[arg-type]
            pod=around,
            deadline=Deadline(),
            lease=around,
            quarantine=around,
            clock=Clock(world.clock, world.epoch, self._sleep),
            retry_waits=RetryWaits(world.random.random),
            raises_defects=True,
            news=Event(world),  # type: ignore[arg-type]
        )

    def kill(self) -> None:
        if self.process is not None:
            self.world.tell(f"{self} dies")
            self.close()

    def close(self) -> None:
        """End the sidecar, and drop what it knew."""
        for process in [self.process, *self.tasks]:
            if process is not None:
                process.kill()
        self.process, self.tasks, self.catalog = None, [], Catalog(Events())

    def finish(self, version: Version) -> None:
        """The trainer wrote the marker."""
        self.version = self.versions[version.checkpoint.version] = version
        self.finished.append(version.checkpoint)
        self.replaced_s = self.world.now_s
        self.store.contents_of.setdefault((self.attempt, version.checkpoint.save_id), {})[self.node.index] = dict(
            version.contents
        )
        self.world.tell(f"{self} finished save {version.checkpoint.save_id}")
        if self.process is not None:
            self.catalog.finished(version.checkpoint, held=True)

    @property
    def outcome(self) -> str | None:
        """``durable`` or why not; ``None`` while that is open."""
        tracked = self.catalog.get(NAME)
        if tracked is None or tracked.state in PENDING:
            return None
        return "durable" if tracked.state is State.COMMITTED else tracked.reason

    @property
    def is_quiet(self) -> bool:
        return self.version is None or self.outcome is not None

    @property
    def replaced(self) -> list[str]:
        """Return the versions that the trainer has written anew, and that still have a journal."""
        assert self.version is not None
        return [version for version in self.memories if version != self.version.checkpoint.version]

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


@functools.lru_cache(4096)
def _entry(path: str, key: str, content: bytes, etag: str) -> FileEntry:
    crc = checksum.text_of(content)
    return FileEntry(path=path, key=key, size_bytes=len(content), crc64nvme=crc, etag=etag)


def version_of(node: Node, attempt: str, save_id: str | None, contents: Mapping[str, bytes], *, at_s: float) -> Version:
    """Return what a trainer finished at a time by its own clock."""
    files = tuple(FoundFile(path, len(content), 0, 0) for path, content in sorted(contents.items()))
    checkpoint = Finished(
        NAME, f"{attempt}-{save_id}-{node.index}", 20, None, attempt, node, at_s, None, files, {}, save_id=save_id
    )
    return Version(checkpoint, contents)
