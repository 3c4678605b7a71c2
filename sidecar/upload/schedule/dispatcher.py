"""Dispatcher: starts the work items of all checkpoints in the order of the queue, within the concurrency limit."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

import structlog

from sidecar.core.schedule.backoff import delay_s
from sidecar.core.schedule.concurrency import awaits_answers
from sidecar.core.schedule.order import waits_for_last_parts
from sidecar.core.schedule.slow_parts import RequestProgress, is_worth_hedging, seen_over_s
from sidecar.errors import AlreadyExists, CorruptObject, NotFound, PartRefused, StoreError, Unstorable
from sidecar.store.slice import BLOCK_BYTES
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import is_silence
from sidecar.transfer.request_batch import OVERTAKEN_AFTER_S
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.work_item import WorkItem

log = structlog.get_logger()

HEDGE_POLL_S = 0.1
"""Interval in seconds at which the last parts of the first checkpoint are checked for slow ones."""
LAST_PARTS_POLL_S = 0.1
"""Interval in seconds at which large files check whether they still wait for the last parts of other uploads."""
_NOT_REPEATED = NotFound | AlreadyExists | Unstorable | CorruptObject | PartRefused
"""Errors after which a work item is not repeated as it is: the parts sent of its file may be void."""
PREEMPTED_RETRY_S = delay_s(5, random_0_1=1.0)
"""Seconds until the retry of a work item that failed while another upload had priority."""

FIRST_RETRY_S = 1.0
"""The same of the first upload, for which the store could not be asked whether it may be sent."""


class LastParts:
    """Progress of the last parts in flight that one transfer waits for."""

    def __init__(self, waiting: FileTransfer | None) -> None:
        self._waiting = waiting
        self._progress = RequestProgress()
        self._seen: tuple[float, int] | None = None

    def is_stale(self, waiting: FileTransfer, left_bytes: int, *, now_s: float, over_s: float) -> bool:
        """Whether the measurement is stale: another transfer waits, more bytes are left, or it is older than ``over_s``."""
        if self._waiting is not waiting or self._seen is None:
            return True
        seen_s, seen_bytes = self._seen
        return left_bytes > seen_bytes or now_s - seen_s > over_s

    def record(self, left_bytes: int, *, now_s: float, over_s: float) -> float | None:
        """Record the bytes not sent yet. Returns their rate in bytes per second; ``None`` before ``over_s`` seconds."""
        self._seen = now_s, left_bytes
        self._progress.record(left_bytes, now_s=now_s, over_s=over_s)
        return self._progress.bytes_per_s


class Dispatcher:
    """Starts work items. Small requests in flight are limited by the round trip, large ones by the measured throughput.

    A large request counts until its last byte is sent: while its answer is pending, the next one uses the link. If more answers
    are pending than a store needs time for, a proxy has the bodies, and the next one waits.
    """

    def __init__(self, executor: StoreExecutor) -> None:
        self._executor = executor
        self._order: list[FileTransfer] = []
        self._strictly = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._large_sending = 0
        self._small_began_s: dict[WorkItem, float] = {}
        self._sending: dict[WorkItem, tuple[FileTransfer, RequestProgress]] = {}
        self._unanswered: dict[WorkItem, FileTransfer] = {}
        """Large requests whose last byte was sent."""
        self._hedge_timer: asyncio.TimerHandle | None = None
        self._last_parts = LastParts(None)
        self._last_parts_timer: asyncio.TimerHandle | None = None

    def reorder(self, order: Sequence[FileTransfer], *, strictly: bool = False) -> None:
        """Change the order. Work items in flight are finished; further ones are taken in the new order.

        ``strictly``: a transfer starts after the last answer to the one before it, not after its last work item was started.
        Otherwise retries of the first one would share the link with the second.
        """
        if order[:1] != self._order[:1]:  # rates measured while a request was paused do not show that it is slow
            self._sending = {item: (transfer, RequestProgress()) for item, (transfer, _) in self._sending.items()}
        self._order, self._strictly = list(order), strictly
        for rank, transfer in enumerate(self._order):
            transfer.retry_gate.put(behind=rank > 0 and self._order[0].has_more)
        self.pump()

    def pump(self) -> None:
        """Start as many work items as may run now."""
        while (taken := self._take()) is not None:
            transfer, item = taken
            self._count(transfer, item, 1)
            self._begin_sending(transfer, item)
            task = asyncio.create_task(self._execute(transfer, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._schedule_hedge_poll()

    def _schedule_hedge_poll(self) -> None:
        """Poll the last parts of the first transfer: one of their connections may be slow."""
        first = self._order[0] if self._order else None
        if self._hedge_timer is None and first is not None and first.large_sending and not first.has_more:
            self._hedge_timer = asyncio.get_running_loop().call_later(HEDGE_POLL_S, self._poll_slow_parts)

    def _poll_slow_parts(self) -> None:
        self._hedge_timer = None
        rate = self._executor.rate()
        if rate is not None and rate.expected > 0 and self._executor.gate.bytes_per_s is None:
            self._hedge_slow_parts(rate.expected)
        self._schedule_hedge_poll()

    def _hedge_slow_parts(self, link_bytes_per_s: float) -> None:
        """Hedge requests of the first transfer that are slow while the link has capacity left."""
        now_s, left = time.monotonic(), {}
        over_s = seen_over_s(requests=len(self._sending), block_bytes=BLOCK_BYTES, link_bytes_per_s=link_bytes_per_s)
        for item, (_, progress) in self._sending.items():
            if item.hedged is not None and (left_bytes := item.hedged.left_bytes) is not None:
                progress.record(left_bytes, now_s=now_s, over_s=over_s)
                left[item] = left_bytes
        used = [self._sending[item][1].bytes_per_s for item in left]
        for item, left_bytes in left.items():
            transfer, progress = self._sending[item]
            if transfer not in self._order[:1] or item.hedged is None or item.hedged.is_hedged:
                continue
            if self._in_flight < self._executor.most and is_worth_hedging(
                left_bytes=left_bytes,
                bytes_per_s=progress.bytes_per_s,
                size_bytes=item.size_bytes,
                others_left_bytes=sum(left.values()) - left_bytes,
                used_bytes_per_s=sum(link_bytes_per_s if rate is None else rate for rate in used),
                link_bytes_per_s=link_bytes_per_s,
            ):
                log.info("part_tried_again", checkpoint=transfer.name, number=item.number, left_bytes=left_bytes)
                self._in_flight += 1
                item.hedged.hedge()

    def _take(self) -> tuple[FileTransfer, WorkItem] | None:
        if self._in_flight >= self._executor.most or self._executor.waits_for_store:
            return None
        limit, small = self._executor.adapted.limit, self._small_turns() < self._executor.small.threads
        for transfer in self._order:
            # The first upload begins at once, beside parts in flight of others; later uploads use the remaining requests.
            busy = transfer.large_sending if transfer is self._order[0] else self._large_sending
            large = busy < limit and not self._awaits_answers(transfer) and not self._waits_for_last_parts(transfer)
            if (item := transfer.take(large=large, small=small)) is not None:
                if item.is_small:
                    item.at_once = min(self._executor.small.at_once, self._executor.most - self._in_flight)
                return transfer, item
            if transfer.has_more and time.monotonic() >= transfer.rest_until_s:
                return None
            if self._strictly and transfer.in_flight:
                return None
        if self._in_flight == 0:
            self._executor.adapted = self._executor.adapted.idle(now_s=time.monotonic())
        return None

    def _awaits_answers(self, transfer: FileTransfer) -> bool:
        """Whether large parts of a transfer wait for answers to parts that were sent; the first transfer only for its own."""
        first, rate = self._order[0], self._executor.rate()
        sent = [item.size_bytes for item, sender in self._unanswered.items() if sender is transfer or transfer is not first]
        return awaits_answers(sent, limit=self._executor.adapted.limit, bytes_per_s=None if rate is None else rate.expected)

    def _waits_for_last_parts(self, transfer: FileTransfer) -> bool:
        """Whether large parts of a transfer wait for the last parts of others. If so, a timer checks again."""
        rate = self._executor.rate()
        items = [item for item, (other, _) in self._sending.items() if other is not transfer and other.is_ending]
        if self._strictly or rate is None or not items:  # the plan of a flush says what is paused
            return False
        left_bytes, link = sum(item.left_bytes for item in items), max(1.0, rate.expected)
        over_s = seen_over_s(requests=len(items), block_bytes=BLOCK_BYTES, link_bytes_per_s=link)
        if self._last_parts.is_stale(transfer, left_bytes, now_s=time.monotonic(), over_s=over_s):
            self._last_parts = LastParts(transfer)
        waits = waits_for_last_parts(
            left_bytes=left_bytes,
            bytes_per_s=self._last_parts.record(left_bytes, now_s=time.monotonic(), over_s=over_s),
            link_bytes_per_s=link,
        )
        if waits and self._last_parts_timer is None:
            self._last_parts_timer = asyncio.get_running_loop().call_later(LAST_PARTS_POLL_S, self._check_again)
        return waits

    def _check_again(self) -> None:
        self._last_parts_timer = None
        self.pump()

    async def _execute(self, transfer: FileTransfer, item: WorkItem) -> None:
        try:
            await transfer.execute(item)
        except StoreError as error:
            if isinstance(error, _NOT_REPEATED):
                transfer.fail(error)
            elif self._executor.waits_for_store:
                transfer.put_back(item, rest_s=0.0)  # all are taken in their order once it answers
            elif transfer.retry_gate.behind or is_silence(error):
                rest_s = PREEMPTED_RETRY_S if transfer.retry_gate.behind else FIRST_RETRY_S
                transfer.put_back(item, rest_s=rest_s)
                asyncio.get_running_loop().call_later(rest_s, self._rested, transfer)
            else:
                transfer.fail(error)
        except Exception as error:
            transfer.fail(error)
        finally:
            self._count(transfer, item, -1)
            if item.hedged is not None and item.hedged.is_hedged:
                self._in_flight -= 1
            item.hedged = None
            self._end_sending(transfer, item)
            self._unanswered.pop(item, None)
            transfer.wake()
            self.pump()

    def _rested(self, transfer: FileTransfer) -> None:
        """End the backoff of a transfer, and of all before it: an older upload is never tried again before a newer one."""
        if transfer in self._order:
            for ahead in self._order[: self._order.index(transfer)]:
                ahead.rest_until_s = 0.0
                ahead.retry_gate.wake()
        self.pump()

    def _count(self, transfer: FileTransfer, item: WorkItem, change: int) -> None:
        self._in_flight += change * item.at_once
        transfer.slots += change * item.at_once
        transfer.in_flight += change
        if item.is_large:
            (transfer.large_in_flight.add if change > 0 else transfer.large_in_flight.discard)(item)
        elif item.is_local:
            transfer.local_in_flight += change
        else:
            self._count_small(item, begins=change > 0)

    def _count_small(self, item: WorkItem, *, begins: bool) -> None:
        if begins:
            self._small_began_s[item] = time.monotonic()
            asyncio.get_running_loop().call_later(OVERTAKEN_AFTER_S * 1.1, self.pump)  # if it is late, another may begin
        else:
            del self._small_began_s[item]

    def _small_turns(self) -> int:
        """Return the number of threads that send small files, without those that wait for a late answer."""
        late_s = time.monotonic() - OVERTAKEN_AFTER_S
        return sum(began_s > late_s for began_s in self._small_began_s.values())

    def _begin_sending(self, transfer: FileTransfer, item: WorkItem) -> None:
        item.is_sending = item.is_large
        if not item.is_sending:
            return
        loop = asyncio.get_running_loop()
        item.on_sent = functools.partial(loop.call_soon_threadsafe, self._all_sent, transfer, item)
        self._sending[item] = transfer, RequestProgress()
        self._count_sending(transfer, 1)

    def _all_sent(self, transfer: FileTransfer, item: WorkItem) -> None:
        if item.is_sending:
            self._end_sending(transfer, item)
            self._unanswered[item] = transfer
            self.pump()

    def _end_sending(self, transfer: FileTransfer, item: WorkItem) -> None:
        if item.is_sending:
            item.is_sending = False
            del self._sending[item]
            self._count_sending(transfer, -1)

    def _count_sending(self, transfer: FileTransfer, change: int) -> None:
        self._large_sending += change
        transfer.large_sending += change
