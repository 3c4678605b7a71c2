"""Push: a checkpoint directory to a store, by the upload job of the sidecar: same order, same checks, same commit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.core.commit.summary import StoredState
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry
from sidecar.core.lifecycle.states import State
from sidecar.download.partial_file import crc_of
from sidecar.errors import CheckpointChanged, CheckpointRejected, NothingFound, RequestRefused
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.idle_prefix import IdlePrefix
from sidecar.repository.verification import Examined, Verifier
from sidecar.standalone.directory import SourceDirectory
from sidecar.standalone.session import OnBytes, StoreSession
from sidecar.store.protocol import Capabilities
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.context import StoreLimits, UploadContext
from sidecar.upload.early.handover import Handover
from sidecar.upload.job import UploadJob
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.schedule.queue import Active, Queue
from sidecar.upload.schedule.retry_waits import RetryWaits
from sidecar.upload.send.journal import Journal
from sidecar.upload.versions import Held, Sent, send_files
from sidecar.volume.opener import Folder, Place
from sidecar.volume.pins import held_as

TRIES = 3
"""Tries of a push whose objects vanish from the store meanwhile."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """Outcome of a push."""

    checkpoint: str
    state: State
    """``COMMITTED``; ``UPLOADED``: it waits for the parts of other nodes."""
    is_new: bool
    """False: the store had the same content already."""
    files: int
    size_bytes: int
    detail: str | None = None


class _Person:
    """Stands for the pod: it has no trainer, and found nothing damaged."""

    def reason(self, name: str, crc: str) -> str | None:
        return None

    def trainer_alive(self) -> bool:
        return False

    def attempt(self) -> str:
        return ""


class _LastError(RetryWaits):
    """Keeps the error that ended a try."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def failed(self, name: str, version: str, error: Exception) -> tuple[float, str]:
        self.error = error
        return 0.0, str(error)


class _DirectoryVersions:
    """``Versions`` of one directory, which is not held by links: it is the person's, and may be on another file system."""

    def __init__(self, context: UploadContext, source: SourceDirectory, journal: Place) -> None:
        self._context = context
        self._source = source
        self._journal = journal
        self.is_changed = False
        """The directory changed while it was read."""

    async def hold(self, checkpoint: Finished) -> Held:
        return Held(self._source, self._context.payloads(checkpoint.name, self._source))

    @contextlib.asynccontextmanager
    async def taken_over(self, active: Active, checkpoint: Finished) -> AsyncIterator[Sent]:
        with contextlib.closing(await self.journal(checkpoint)) as journal:
            yield Sent(journal, Handover(journal))

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        entries = await send_files(self._context, active, checkpoint, held, sent, guard)
        if not await self._source.is_unchanged():
            raise CheckpointChanged(checkpoint.name)
        return entries

    async def journal(self, checkpoint: Finished) -> Journal:
        return await asyncio.to_thread(Journal, self._journal)

    def let_go(self, checkpoint: Finished) -> None:
        self._journal.discard()

    def has_no_marker(self, name: str) -> bool:
        return False

    def examine_again(self, name: str) -> None:
        self.is_changed = True


async def _dispatch(context: UploadContext, active: Active) -> None:
    """Start the work items of the only upload until cancelled."""
    dispatcher = Dispatcher(context.executor)
    while True:
        dispatcher.reorder([] if active.transfer is None else [active.transfer])
        await context.news.wait()
        context.news.clear()


class Pusher:
    """Pushes directories to one store."""

    def __init__(self, session: StoreSession, idle: IdlePrefix, capabilities: Capabilities, *, state: Path) -> None:
        """Push below a prefix that no run uses.

        ``state``: folder for journals, which exists: an interrupted push continues from its own.
        """
        self._session = session
        self._idle = idle
        self._state = Folder(state)
        self._committer = Committer(session.store, session.executor, lease=idle)
        self._limits = StoreLimits(capabilities)

    async def push(self, source: SourceDirectory, checkpoint: Finished, on_bytes: OnBytes, *, replace: bool) -> Pushed:
        """Upload a checkpoint and commit it.

        ``source``: its directory, which was read. ``replace``: replace another checkpoint of this name in the store.

        Raises:
            RequestRefused: The store has another checkpoint of this name, or the directory changes while it is read.
            Fenced: A run has begun to use the prefix.
            SidecarError, OSError: It could not be sent; what arrived is not committed.
        """
        is_there = await self._is_there(source, checkpoint, replace=replace)
        if is_there:
            return Pushed(checkpoint.name, State.COMMITTED, False, len(checkpoint.files), checkpoint.size_bytes)
        tracked = await self._upload(source, checkpoint, on_bytes)
        if tracked.state is State.COMMITTED and not await self._committer.is_still_committed(checkpoint, thoroughly=True):
            raise RequestRefused(f"{checkpoint.name}: it was committed, and another writer has changed it since: push it again")
        return Pushed(checkpoint.name, tracked.state, True, len(checkpoint.files), checkpoint.size_bytes, detail=tracked.reason)

    async def _is_there(self, source: SourceDirectory, checkpoint: Finished, *, replace: bool) -> bool:
        """Whether the store has this content already. Another commit of the step is revoked if it may be replaced."""
        where = f"{self._session.store.url}/{checkpoint.name}"
        try:
            there = await Verifier(self._session.store, self._session.executor).examine(checkpoint.name)
        except NothingFound:
            return False
        if there.state is StoredState.FOREIGN and not replace:
            raise RequestRefused(f"{where}: another program has written it: choose another prefix, or add --replace")
        if there.commit is None and there.state is not StoredState.UNREADABLE:
            return False
        if checkpoint.node.count > 1:  # the job compares this node's part
            return False
        if not there.problems and await asyncio.to_thread(_is_equal, source, checkpoint, there):
            return True
        if not replace:
            raise RequestRefused(f"{where}: it is {there.state.value} with other content: add --replace to replace it")
        stored = await self._committer.stored_commit(checkpoint.name)
        if not await self._committer.revoke_commit(checkpoint.name, judged=stored):
            raise RequestRefused(f"{where}: it was committed again meanwhile: look at it, and push again")
        return False

    async def _upload(self, source: SourceDirectory, checkpoint: Finished, on_bytes: OnBytes) -> Tracked:
        session, person, last = self._session, _Person(), _LastError()
        events = Events()
        context = UploadContext(
            store=session.store,
            limits=self._limits,
            executor=session.executor,
            committer=self._committer,
            catalog=Catalog(events),
            flush=FlushControl(session.executor, events),
            pod=person,
            deadline=Deadline(),
            lease=self._idle,
            quarantine=person,
            retry_waits=last,
            raises_defects=True,  # there are no others
        )
        place = self._state / f"{held_as(checkpoint.name, checkpoint.version)}.jsonl"
        versions = _DirectoryVersions(context, source, place)
        for _ in range(TRIES):
            tracked = context.catalog.finished(checkpoint, held=False)
            await self._run(context, versions, tracked, on_bytes)
            _raise_failure(tracked, versions, last)
            if tracked.state in (State.COMMITTED, State.UPLOADED):
                break
        else:
            raise RequestRefused(f"{checkpoint.name}: {tracked.reason}: its objects vanish from the store: what deletes them?")
        return tracked

    async def _run(self, context: UploadContext, versions: _DirectoryVersions, tracked: Tracked, on_bytes: OnBytes) -> None:
        nothing_early: object = None
        queue = Queue(context.catalog, nothing_early, context.flush)  # type: ignore[arg-type]
        active = queue.active[tracked.name] = Active(tracked)
        check = PostCommitCheck(context.catalog, context.committer, context.deadline)
        job = asyncio.create_task(UploadJob(context, versions, queue, check, active).run())
        dispatching = asyncio.create_task(_dispatch(context, active))
        try:
            while not job.done():
                on_bytes(tracked.name, tracked.sent_bytes, tracked.size_bytes)
                await asyncio.wait({job}, timeout=0.2)
            await job
        finally:
            job.cancel()
            dispatching.cancel()
            await asyncio.wait({job, dispatching})


def _is_equal(source: SourceDirectory, checkpoint: Finished, there: Examined) -> bool:
    """Whether a directory has exactly the files of a commit. Blocks: it reads the directory if the sizes are equal."""
    files = {entry.path: entry for _, entry in there.files()}
    if {file.path: file.size_bytes for file in checkpoint.files} != {e.path: e.size_bytes for e in files.values()}:
        return False
    for path, entry in files.items():
        with source.open(path) as fd:
            if crc_of(fd, 0, entry.size_bytes) != entry.crc:
                return False
    return True


def _raise_failure(tracked: Tracked, versions: _DirectoryVersions, last: _LastError) -> None:
    if versions.is_changed:
        raise RequestRefused(f"{tracked.name}: its directory changed while it was read: nothing was committed; push it again")
    if last.error is not None:
        raise last.error
    if tracked.state is State.LOST:
        raise CheckpointRejected(f"{tracked.name}: {tracked.reason}")
    if tracked.state in (State.GIVEN_UP, State.SUPERSEDED, State.REJECTED):
        raise RequestRefused(f"{tracked.name}: {tracked.reason}")
