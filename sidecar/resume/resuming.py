"""Answers "where do I continue?": chooses the newest usable checkpoint, brings it to the volume, remembers what was wrong."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import structlog

from sidecar.catalog import Catalog, Tracked
from sidecar.core.layout import Share
from sidecar.core.manifest import Commit
from sidecar.core.resume import PassedOver, differs_from_its_commit, matches_train_call, may_replace, newest_first
from sidecar.core.states import PENDING, State
from sidecar.errors import CheckpointChanged, CorruptObject, NotFound
from sidecar.events import Events
from sidecar.resume.downloader import Downloader, Offer
from sidecar.resume.quarantine import UNREADABLE, Quarantine
from sidecar.transfer import Health, awaited
from sidecar.volume.volume import Volume
from trainer_hook.contract import META_RESTORED, ContractError, Node, step_of

log = structlog.get_logger()

LATEST = "latest"
LOCAL_PATIENCE_S = 10.0
"""How long a store that does not answer is waited for when the volume has something to continue from."""


class ResumeState(StrEnum):
    """How far the answer is."""

    IDLE = "idle"
    CHOOSING = "choosing"
    DOWNLOADING = "downloading"
    READY = "ready"
    """``path`` can be loaded."""
    NONE = "none"
    """There is nothing to continue from; ``passed_over`` says why."""
    FAILED = "failed"
    """There is something, and it cannot be had now; ``detail`` says what to do."""


RESUME_ENDED = frozenset({ResumeState.READY, ResumeState.NONE, ResumeState.FAILED})


@dataclass(frozen=True, slots=True)
class ResumeStatus:
    """The answer so far. Replaced, never changed."""

    state: ResumeState = ResumeState.IDLE
    requested: str | None = None
    train_call: int | None = None
    share: Share | None = None
    """The ranks that it is for; ``None``: whoever asked wants all files."""
    checkpoint: str | None = None
    step: int | None = None
    path: str | None = None
    source: str | None = None
    """``local``: it was on the volume; ``store``: it was downloaded."""
    meta: dict[str, Any] = field(default_factory=dict)
    done_bytes: int = 0
    total_bytes: int = 0
    passed_over: tuple[PassedOver, ...] = ()
    detail: str | None = None


class Resuming:
    """One request at a time; the same request joins the one under way."""

    def __init__(
        self,
        *,
        volume: Volume,
        catalog: Catalog,
        events: Events,
        health: Health,
        node: Node | None,
        enabled: bool,
        look_at_volume: Callable[[], Awaitable[None]],
    ) -> None:
        self._volume = volume
        self._catalog = catalog
        self._events = events
        self._health = health
        self._node = node or Node()
        self._enabled = enabled
        self._look_at_volume = look_at_volume
        self.downloader: Downloader | None = None
        """Reads the store; ``None`` until it was reached."""
        self._ready = asyncio.Event()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unended: set[asyncio.Task[None]] = set()
        """The task and those that it replaced and that still end their threads."""
        self._quarantine = Quarantine(volume.journal / "quarantine.json")
        catalog.on_durable = self._durable
        self._status = ResumeStatus()
        self._asked_s = 0.0

    @property
    def status(self) -> ResumeStatus:
        """The answer so far, with the store's trouble while it waits for the store."""
        if self._status.state in (ResumeState.CHOOSING, ResumeState.DOWNLOADING):
            return replace(self._status, detail=self._waiting_for())
        return self._status

    @property
    def in_use(self) -> str | None:
        """Name of the checkpoint that is being fetched or was handed out: it must not be deleted."""
        return self._status.checkpoint

    @property
    def quarantined(self) -> dict[str, str]:
        """Committed checkpoints that failed verification, by name, and why."""
        return self._quarantine.reasons()

    def is_quarantined(self, name: str, crc: str) -> bool:
        """Whether exactly this commit, named by its checksum, failed verification."""
        return self._quarantine.reason(name, crc) is not None

    def _durable(self, tracked: Tracked) -> None:
        self._quarantine.release(tracked.name, committed_at_s=tracked.committed_at_s)

    def opened(self, downloader: Downloader) -> None:
        """The store answers and the volume was scanned once: requests can be worked on."""
        self.downloader = downloader
        self._ready.set()

    def request(self, checkpoint: str = LATEST, train_call: int | None = None, share: Share | None = None) -> ResumeStatus:
        """Begin a request, or join the one under way if it is the same."""
        status = self._status
        same = (status.requested, status.train_call, status.share) == (checkpoint, train_call, share)
        running = self._task is not None and not self._task.done()
        if not (running and same):
            if self._task is not None:
                self._task.cancel()
            self._asked_s = time.monotonic()
            self._show(ResumeStatus(ResumeState.CHOOSING, requested=checkpoint, train_call=train_call, share=share))
            before = frozenset(self._unended)
            self._task = asyncio.create_task(self._answer_after(before, checkpoint, train_call))
            self._unended.add(self._task)
            self._task.add_done_callback(self._unended.discard)
        return self.status

    def begin_early(self) -> None:
        """Begin with what a trainer most likely asks for, unless it has asked already."""
        if self._status.state is ResumeState.IDLE:
            self.request()

    async def progress(self, *, timeout_s: float) -> ResumeStatus:
        """Return the status when it has ended, or after ``timeout_s``."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._status.state not in RESUME_ENDED | {ResumeState.IDLE}:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._news.wait()
            except TimeoutError:
                break
        return self.status

    def close(self) -> None:
        """Stop a request that is under way; what was downloaded is kept."""
        if self._task is not None:
            self._task.cancel()

    async def _answer_after(self, before: frozenset[asyncio.Task[None]], wanted: str, train_call: int | None) -> None:
        # A cancelled download ends its threads and finishes what it is publishing: both in the folder that we use next.
        if before:
            await asyncio.wait(before)
        with awaited():
            await self._answer(wanted, train_call)

    async def _answer(self, wanted: str, train_call: int | None) -> None:
        try:
            if not self._enabled:
                self._end(ResumeState.NONE, detail="CKPT_RESUME=off")
                return
            await self._look_at_volume()
            if wanted == LATEST:
                await self._answer_latest(train_call)
            elif not await self._try(wanted, train_call):
                self._end(ResumeState.NONE)
        except CheckpointChanged as changed:
            self._end(ResumeState.FAILED, detail=f"the trainer wrote {changed.path} itself: ask again, or delete it first")
        except OSError as error:
            hint = "free space on the volume or make it larger, then ask again"
            what = self._status.checkpoint or self._volume.root
            self._end(ResumeState.FAILED, detail=f"{what}: {error.strerror or error}: {hint}")
        except Exception as error:
            log.exception("resume_failed")
            self._end(ResumeState.FAILED, detail=f"{type(error).__name__}: {error}")

    async def _answer_latest(self, train_call: int | None) -> None:
        fallback = await self._newest_local(train_call, restored=True)
        names = await self._in_store(patience_s=None if fallback is None else LOCAL_PATIENCE_S)
        local = await self._newest_local(train_call, committed=names or [])
        for name in names or []:
            if local is not None and _step(local) >= _step_of(name):
                break
            if await self._try(name, train_call):
                return
        # Looked up again: the trainer may have finished one while the store was read. And what was once downloaded and
        # verified is better than to begin from scratch.
        local = await self._newest_local(train_call, restored=True, committed=names or [])
        if local is not None:
            self._use_local(local)
        else:
            self._end(ResumeState.NONE)

    async def _in_store(self, *, patience_s: float | None) -> list[str] | None:
        """Return the names to try, newest first; ``None`` when the store does not answer within ``patience_s``."""
        try:
            async with asyncio.timeout(patience_s):
                return newest_first(await (await self._reader()).committed())
        except TimeoutError:
            log.warning(
                "resume_without_store", hint="the newest checkpoint on the volume is used", trouble=self._health.trouble
            )
            return None

    async def _reader(self) -> Downloader:
        await self._ready.wait()
        assert self.downloader is not None
        return self.downloader

    async def _newest_local(
        self, train_call: int | None, *, restored: bool = False, committed: Sequence[str] = ()
    ) -> Tracked | None:
        """Return the newest checkpoint of the volume that can be used as it is.

        Only where this node's part is the whole checkpoint, and only what this pod's trainer wrote: the rest is compared
        with the store first. ``restored`` takes in what was downloaded and verified before, for when the store has no answer;
        ``committed`` are names of which the store may know better.
        """
        usable = [
            t
            for t in self._catalog.all()
            if (t.state in PENDING or t.state is State.COMMITTED)
            and t.checkpoint is not None
            and t.checkpoint.resume_step is not None
            and t.checkpoint.node.count == 1
            and not t.checkpoint.is_partial
            and (restored or t.checkpoint.restored_from is None)
            and matches_train_call(t.checkpoint.meta, train_call)
        ]
        for tracked in sorted(usable, key=_step, reverse=True):
            assert tracked.checkpoint is not None
            unchanged = await asyncio.to_thread(self._volume.is_unchanged, tracked.checkpoint)
            if unchanged and not (tracked.name in committed and await self._is_torn(tracked)):
                return tracked
            hint = "files were changed or deleted since it was finished"
            log.warning("local_checkpoint_not_used", checkpoint=tracked.name, hint=hint)
        return None

    async def _is_torn(self, local: Tracked) -> bool:
        """Whether the store has the same finished checkpoint with other files than the volume.

        Files that were deleted before this life of the sidecar looked leave no trace on the volume.
        """
        if local.state is State.COMMITTED or local.checkpoint is None:  # in this life, from these files
            return False
        try:
            found = await (await self._reader()).commit(local.name)
        except ContractError:
            return False
        return found is not None and differs_from_its_commit(local.checkpoint, found[0])

    async def _try(self, name: str, train_call: int | None) -> bool:
        """Return whether the checkpoint was made usable."""
        reader, crc = await self._reader(), None
        try:
            found = await reader.commit(name)
            if found is None:
                self._pass_over(name, "not committed: without its commit it is not known to be complete")
                return False
            commit, crc = found
            if not matches_train_call(commit.meta, train_call):
                return False
            if (reason := self._quarantine.reason(name, crc)) is not None:
                self._pass_over(name, reason)
                return False
            await self._fetch(reader, commit, crc)
            self._quarantine.release(name)
        except (ContractError, CorruptObject, NotFound) as error:
            self._quarantine.add(name, crc or UNREADABLE, str(error))
            self._events.happened(
                "checkpoint_quarantined", level="error", checkpoint=name, reason=str(error), hint="the next older one is tried"
            )
            self._pass_over(name, str(error))
            return False
        return True

    async def _fetch(self, reader: Downloader, commit: Commit, crc: str) -> None:
        name = commit.name
        self._set(replace(self._status, checkpoint=name, step=commit.step, total_bytes=commit.size_bytes, done_bytes=0))
        offer = await reader.offer(commit, crc, self._status.share)
        self._say_if_elastic(offer)
        known = self._catalog.get(name)
        unknown = self._volume.marker_signature(name) not in (None, known.version if known else None)
        if unknown or not may_replace(known.checkpoint if known else None, commit):
            raise CheckpointChanged(name)
        source = "local"
        if not (self._volume.marker_signature(name) and await reader.is_local(offer, self._node)):
            source = "store"
            self._set(replace(self._status, state=ResumeState.DOWNLOADING))
            size_bytes, left_out = sum(entry.size_bytes for entry in offer.files(self._node)), offer.left_out(self._node)
            self._events.happened("resume_download_started", checkpoint=name, size_bytes=size_bytes, files_left_out=left_out)
            # Told by threads that outlive a cancelled request, too.
            await reader.download(offer, self._node, functools.partial(self._progressed, asyncio.current_task()))
        self._end(ResumeState.READY, checkpoint=name, step=commit.step, source=source, meta=dict(commit.meta))

    def _say_if_elastic(self, offer: Offer) -> None:
        if len(offer.manifests) != self._node.count:
            self._events.happened(
                "resume_with_other_node_count",
                level="warning",
                checkpoint=offer.name,
                saved_nodes=len(offer.manifests),
                nodes=self._node.count,
                saved_world_size=offer.commit.world_size,
                hint="every node gets the files of all; only a sharded checkpoint (DCP) fits another number of ranks exactly",
            )

    def _use_local(self, tracked: Tracked) -> None:
        assert tracked.checkpoint is not None
        meta = {key: value for key, value in tracked.checkpoint.meta.items() if key != META_RESTORED}
        self._end(ResumeState.READY, checkpoint=tracked.name, step=tracked.checkpoint.step, source="local", meta=meta)

    def _pass_over(self, name: str, reason: str) -> None:
        passed = (*self._status.passed_over, PassedOver(name, reason))
        self._set(replace(self._status, passed_over=passed, checkpoint=None, step=None))

    def _progressed(self, request: asyncio.Task[Any] | None, done_bytes: int, total_bytes: int) -> None:
        if request is not self._task:
            return
        self._show(replace(self._status, done_bytes=done_bytes, total_bytes=total_bytes))
        self._events.happened(
            "resume_download_progress",
            quiet=True,
            checkpoint=self._status.checkpoint,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )

    def _end(
        self,
        state: ResumeState,
        *,
        checkpoint: str | None = None,
        step: int | None = None,
        source: str | None = None,
        meta: dict[str, Any] | None = None,
        detail: str | None = None,
    ) -> None:
        if asyncio.current_task() is not self._task:
            return
        path = str(self._volume.root / checkpoint) if checkpoint else None
        self._set(
            replace(
                self._status,
                state=state,
                checkpoint=checkpoint,
                step=step,
                path=path,
                source=source,
                meta=meta or {},
                detail=detail,
            )
        )
        took_s = round(time.monotonic() - self._asked_s, 3)
        named: dict[str, Any] = {"checkpoint": checkpoint, "step": step, "source": source, "detail": detail}
        said = {key: value for key, value in named.items() if value is not None}
        self._events.happened(f"resume_{state.value}", passed_over=len(self._status.passed_over), took_s=took_s, **said)

    def _waiting_for(self) -> str | None:
        if self._health.trouble is not None:
            return f"{self._health.trouble}; trying again"
        return None if self._ready.is_set() else "the store was not reached yet; trying again"

    def _set(self, status: ResumeStatus) -> None:
        """Change the answer, unless another request has taken the place of the one that calls."""
        if asyncio.current_task() is self._task:
            self._show(status)

    def _show(self, status: ResumeStatus) -> None:
        self._status = status
        self._news.set()
        self._news = asyncio.Event()


def _step(tracked: Tracked) -> int:
    return tracked.checkpoint.step if tracked.checkpoint and tracked.checkpoint.step is not None else -1


def _step_of(name: str) -> int:
    step = step_of(name)
    return -1 if step is None else step
