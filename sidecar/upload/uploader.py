"""Takes finished checkpoints to the store, newest first, and tells the catalog what became of each.

Each pending checkpoint is a task of its own that asks, sends, publishes and commits. What they have to send goes through one
stream, in the order of the queue, so that a newer checkpoint goes first at once and nothing waits for a link that is idle.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from sidecar.catalog.scanner import Scanner
from sidecar.core.lifecycle.states import State
from sidecar.core.schedule.order import superseded
from sidecar.errors import Fenced, StoreError
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.context import UploadContext
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.upload.job import COMMIT_POLL_S, UploadJob
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.schedule.flush_control import PLAN_S
from sidecar.upload.schedule.queue import Active, Queue
from sidecar.upload.versions import VolumeVersions
from sidecar.volume.volume import Volume
from sidecar.volume.watch import Hints

log = structlog.get_logger()


class Uploader:
    """Decides which checkpoint is sent next; ``UploadJob`` says what happens to it."""

    def __init__(
        self, context: UploadContext, *, volume: Volume, scanner: Scanner, hints: Hints, skip_superseded: bool
    ) -> None:
        self._context = context
        self._skip_superseded = skip_superseded
        self._dispatcher = Dispatcher(context.executor)
        self._early = EarlyUploads(context, volume, hints)
        self._versions = VolumeVersions(context, volume, scanner, self._early)
        self._queue = Queue(context.catalog, self._early, context.flush)
        self._post_commit_check = PostCommitCheck(
            context.catalog, context.committer, context.pod, clock=context.clock.monotonic
        )

    async def run(self) -> None:
        """Upload until cancelled. Run again after a mistake, it begins with what the journals say."""
        context = self._context
        self._queue.active.clear()
        self._dispatcher = Dispatcher(context.executor)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._early.run())
            tasks.create_task(self._commit_when_all_are_there())
            tasks.create_task(self._keep_pace())
            tasks.create_task(self._post_commit_check.run())
            while True:
                self._queue.plan(context.pod)
                self._drop_superseded(tasks)
                self._begin_and_end(tasks)
                ordered = self._queue.in_order()
                self._dispatcher.reorder(ordered, strictly=context.is_going())
                context.flush.hold(ordered, next_up=self._queue.handed_over())
                await context.news.wait()
                context.news.clear()

    async def _listen(self) -> None:
        while True:
            self._context.news.set()  # first: what changed while nobody was listening is news, too
            await self._context.catalog.changed()

    async def _keep_pace(self) -> None:
        """Measure what leaves, and while the pod is going decide again as it changes."""
        executor, was_going = self._context.executor, False
        while True:
            is_going = self._context.is_going()
            busy = any(transfer.in_flight for transfer in self._queue.all().values())
            executor.pace.look(executor.gate.passed_bytes, now_s=time.monotonic(), busy=busy)
            if is_going or was_going:
                self._context.news.set()
            if is_going is not was_going:
                was_going = is_going
                self._queue.wake_those_behind()
                self._early.look_now()
            await executor.pause(PLAN_S)

    def _begin_and_end(self, tasks: asyncio.TaskGroup) -> None:
        """Begin what has its turn; end what was written anew, deleted or superseded meanwhile."""
        for active in self._queue.active.values():
            if active.transfer is not None and not self._context.catalog.is_current(active.tracked):
                active.transfer.close()
        for active in self._queue.begin():
            tasks.create_task(self._job(active).run())

    def _drop_superseded(self, tasks: asyncio.TaskGroup) -> None:
        catalog = self._context.catalog
        # What was finished later than the newest durable one is superseded by nothing: the run went back to an older step.
        pending = [t for t in catalog.pending() if not catalog.is_after_newest_durable(t)]
        queue = {t.name: t for t in pending if self._skip_superseded or self._queue.waits_for_others(t)}
        newest = catalog.newest_durable_step
        for old in superseded((t.waiting for t in queue.values()), newest_committed_step=newest):
            tracked = queue[old.name]
            waited = self._queue.waits_for_others(tracked)
            why = "other nodes did not finish it" if waited else "CKPT_SUPERSEDED=skip"
            catalog.move(tracked, State.SUPERSEDED, reason=f"step {newest} is durable and {why}")
            if tracked.name not in self._queue.active:
                tasks.create_task(self._job(Active(tracked)).discard())

    async def _commit_when_all_are_there(self) -> None:
        while True:
            for tracked in self._context.catalog.pending():
                if self._queue.waits_for_others(tracked):
                    job = self._job(Active(tracked))
                    try:
                        await job.commit()
                    except Fenced as error:
                        job.give_up(str(error))
                    except StoreError as error:
                        log.warning("commit_tried_again", checkpoint=tracked.name, error=str(error))
            await asyncio.sleep(COMMIT_POLL_S)

    def _job(self, active: Active) -> UploadJob:
        return UploadJob(self._context, self._versions, self._queue, self._post_commit_check, active)
