"""Uploads finished checkpoints to the store, newest first, and records the outcome of each in the catalog.

Each pending checkpoint has its own task, an ``UploadJob``. The work items of all of them pass through one dispatcher in the
order of the queue: a newer checkpoint preempts the others at once, and the link is not idle while any of them has work.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from sidecar.catalog.catalog import Tracked
from sidecar.core.schedule.order import superseded
from sidecar.errors import Fenced, NeverDurable, StoreError
from sidecar.tasks import task_group
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.context import UploadContext
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.upload.job import COMMIT_POLL_S, UploadJob
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.schedule.flush_control import REPLAN_S
from sidecar.upload.schedule.queue import Active, Queue
from sidecar.upload.versions import Versions

log = structlog.get_logger()


class Tasks(Protocol):
    """What runs coroutines beside the caller: ``asyncio.TaskGroup``, or the processes of a simulation."""

    def create_task(self, work: Coroutine[Any, Any, None], /) -> object:
        """Start a coroutine."""
        ...


class Uploader:
    """Decides which checkpoint is sent next. ``UploadJob`` uploads it."""

    def __init__(self, context: UploadContext, versions: Versions, early: EarlyUploads, *, skip_superseded: bool) -> None:
        self._context = context
        self._versions = versions
        self._early = early
        self._skip_superseded = skip_superseded
        self._dispatcher = Dispatcher(context.executor)
        self._queue = Queue(context.catalog, early, context.flush)
        self._post_commit_check = PostCommitCheck(context.catalog, context.committer, context.deadline, clock=context.clock)

    async def run(self) -> None:
        """Upload until cancelled. After an exception it can be run again, and continues from the journals."""
        self._dispatcher.reorder([])
        for transfer in self._queue.transfers().values():  # of a run that failed: requests in flight end, no further ones begin
            transfer.close()
        self._queue.active.clear()
        self._dispatcher = Dispatcher(self._context.executor)
        async with task_group() as tasks:
            tasks.create_task(self._early.run())
            tasks.create_task(self._replan())
            await self.upload(tasks)

    async def upload(self, tasks: Tasks) -> None:
        """Upload finished checkpoints until cancelled; ``tasks`` runs the jobs. Neither threads nor the volume are needed."""
        context = self._context
        tasks.create_task(self._listen())
        tasks.create_task(self._commit_when_complete())
        tasks.create_task(self._post_commit_check.run())
        while True:
            self._queue.plan(context.deadline, context.pod)
            self._drop_superseded()
            self._discard_replaced(tasks)
            self._start_and_close_jobs(tasks)
            ordered = self._queue.in_order()
            self._dispatcher.reorder(ordered, strictly=context.deadline.is_set())
            context.flush.pause_behind_first(ordered, next_up=self._queue.handed_over())
            await context.news.wait()
            context.news.clear()

    def store_is_back(self) -> None:
        """Decide the order anew: the store was away, and has answered."""
        self._queue.decide_anew()
        self._context.news.set()

    async def _listen(self) -> None:
        while True:
            self._context.news.set()  # before the wait: changes before this task ran must not be missed
            await self._context.catalog.changed()

    async def _replan(self) -> None:
        """Sample the rate of sent bytes. After a termination notice each sample triggers a new plan of the flush."""
        executor, was_terminating = self._context.executor, False
        while True:
            is_terminating = self._context.deadline.is_set()
            busy = any(transfer.in_flight for transfer in self._queue.transfers().values())
            executor.sent_rate.sample(executor.gate.passed_bytes, now_s=time.monotonic(), busy=busy)
            if is_terminating or was_terminating:
                self._context.news.set()
            if is_terminating is not was_terminating:
                was_terminating = is_terminating
                self._queue.wake_waiting()
                self._early.poll_now()
            await executor.pause(REPLAN_S)

    def _start_and_close_jobs(self, tasks: Tasks) -> None:
        """Start the uploads whose turn it is; close those that were rewritten, deleted or superseded meanwhile."""
        for active in self._queue.active.values():
            if active.transfer is not None and not self._context.catalog.is_current(active.tracked):
                active.transfer.close()
        for active in self._queue.begin():
            tasks.create_task(self._job(active).run())

    def _drop_superseded(self) -> None:
        catalog = self._context.catalog
        for tracked in catalog.pending() if self._skip_superseded else ():
            if not self._queue.waits_for_others(tracked) and self._is_superseded(tracked):
                catalog.supersede(tracked, f"step {catalog.newest_durable_step} is durable and CKPT_SUPERSEDED=skip")

    def _is_superseded(self, tracked: Tracked) -> bool:
        catalog = self._context.catalog
        # A checkpoint finished after the newest durable one is not superseded: the run had resumed from an older step.
        if catalog.is_after_newest_durable(tracked):
            return False
        return bool(superseded([tracked.waiting], newest_committed_step=catalog.newest_durable_step))

    def _no_longer_awaited(self, tracked: Tracked) -> str | None:
        """Return why the other nodes' parts of a checkpoint are not waited for any more; ``None``: they are."""
        catalog = self._context.catalog
        newest = f"step {catalog.newest_durable_step}"
        if self._is_superseded(tracked):
            return f"{newest} is durable and other nodes did not finish it"
        if not catalog.is_after_newest_durable(tracked) and catalog.is_of_abandoned_attempt(tracked):
            return f"{newest} of a later attempt is durable and other nodes did not finish it"
        return None

    def _discard_replaced(self, tasks: Tasks) -> None:
        """Discard versions that were superseded or finished anew while they waited: for their turn, a retry or other nodes."""
        for tracked in self._context.catalog.take_replaced():
            active = self._queue.active.get(tracked.name)
            if active is None or active.tracked is not tracked:  # otherwise its job does that
                tasks.create_task(self._job(Active(tracked)).discard())

    async def _commit_when_complete(self) -> None:
        while True:
            for tracked in self._context.catalog.pending():
                await self._commit_or_supersede(tracked)
            await self._context.clock.sleep(COMMIT_POLL_S)

    async def _commit_or_supersede(self, tracked: Tracked) -> None:
        if not self._is_awaited(tracked):
            return
        job, self._queue.committing = self._job(Active(tracked)), tracked.name
        why = self._no_longer_awaited(tracked)
        try:
            await job.commit(reads_now=why is not None)  # another node may have committed it just now
            if why is not None and self._is_awaited(tracked):
                self._context.catalog.supersede(tracked, why)
        except Fenced as error:
            job.give_up(str(error))
        except NeverDurable as error:
            job.reject(str(error))
            await job.discard()
        except StoreError as error:
            if not self._context.executor.waits_for_store:  # else the log has it, and a line for each would fill it
                log.warning("commit_tried_again", checkpoint=tracked.name, error=str(error))
        except Exception as error:
            self._context.report_defect(tracked.name, error)
        finally:
            self._queue.committing = None

    def _is_awaited(self, tracked: Tracked) -> bool:
        return self._queue.waits_for_others(tracked) and self._context.catalog.is_current(tracked)

    def _job(self, active: Active) -> UploadJob:
        return UploadJob(self._context, self._versions, self._queue, self._post_commit_check, active)
