"""One stream of work for the link: pieces of all checkpoints, in the order of the queue, as many at once as pay off."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

import structlog

from sidecar.core.schedule.backoff import delay_s
from sidecar.core.schedule.slow_parts import Progress, is_worth_a_second_try, seen_over_s
from sidecar.errors import AlreadyExists, CorruptObject, NotFound, StoreError, TooLarge
from sidecar.store.slice import BLOCK_BYTES
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.request_batch import LATE_S
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.work_item import WorkItem

log = structlog.get_logger()

LOOK_S = 0.1
"""How often the last bytes of a checkpoint are looked at."""
AGAIN_S = delay_s(5, random_0_1=1.0)
"""How long a piece that failed while something else went first is left alone."""


class Dispatcher:
    """Small requests run as many at once as the way to the store has room for, large ones the number that was found to be fast.

    A large one counts until its last byte has left: while its answer is on the way, the next uses the link.
    """

    def __init__(self, executor: StoreExecutor) -> None:
        self._executor = executor
        self._order: list[FileTransfer] = []
        self._strictly = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._large_leaving = 0
        self._small_began_s: dict[WorkItem, float] = {}
        self._leaving: dict[WorkItem, tuple[FileTransfer, Progress]] = {}
        self._looking: asyncio.TimerHandle | None = None

    def reorder(self, order: Sequence[FileTransfer], *, strictly: bool = False) -> None:
        """Change what goes first. Pieces under way are finished; further ones are taken in the new order.

        Args:
            order: All that may be sent.
            strictly: The next begins when the last answer to the one before is there, not when its last piece has begun: what
                was lost on the way and is sent again would have to share the link.
        """
        if order[:1] != self._order[:1]:  # what was held meanwhile was not slow
            self._leaving = {item: (transfer, Progress()) for item, (transfer, _) in self._leaving.items()}
        self._order, self._strictly = list(order), strictly
        for rank, transfer in enumerate(self._order):
            transfer.retry_gate.put(behind=rank > 0 and self._order[0].has_more)
        self.pump()

    def pump(self) -> None:
        """Begin as many pieces as may run now."""
        while (taken := self._take()) is not None:
            transfer, item = taken
            self._count(transfer, item, 1)
            self._leaves(transfer, item)
            task = asyncio.create_task(self._carry(transfer, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._look_later()

    def _look_later(self) -> None:
        """Look again and again at the last bytes of what goes first: one connection alone may be slow."""
        first = self._order[0] if self._order else None
        if self._looking is None and first is not None and first.large_leaving and not first.has_more:
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._looking = None
        rate = self._executor.rate()
        if rate is not None and rate.expected > 0 and self._executor.gate.bytes_per_s is None:
            self._look_for_laggards(rate.expected)
        self._look_later()

    def _look_for_laggards(self, link_bytes_per_s: float) -> None:
        """Begin a second try beside a request of what goes first, where the link has room and the request does not use it."""
        now_s, left = time.monotonic(), {}
        over_s = seen_over_s(requests=len(self._leaving), block_bytes=BLOCK_BYTES, link_bytes_per_s=link_bytes_per_s)
        for item, (_, course) in self._leaving.items():
            if item.hedged is not None and (left_bytes := item.hedged.left_bytes) is not None:
                course.saw(left_bytes, now_s=now_s, over_s=over_s)
                left[item] = left_bytes
        used = [self._leaving[item][1].bytes_per_s for item in left]
        for item, left_bytes in left.items():
            transfer, course = self._leaving[item]
            if transfer not in self._order[:1] or item.hedged is None or item.hedged.has_second:
                continue
            if self._in_flight < self._executor.most and is_worth_a_second_try(
                left_bytes=left_bytes,
                bytes_per_s=course.bytes_per_s,
                size_bytes=item.size_bytes,
                others_left_bytes=sum(left.values()) - left_bytes,
                used_bytes_per_s=sum(link_bytes_per_s if rate is None else rate for rate in used),
                link_bytes_per_s=link_bytes_per_s,
            ):
                log.info("part_tried_again", checkpoint=transfer.name, number=item.number, left_bytes=left_bytes)
                self._in_flight += 1
                item.hedged.try_again()

    def _take(self) -> tuple[FileTransfer, WorkItem] | None:
        if self._in_flight >= self._executor.most:
            return None
        limit, small = self._executor.adapted.limit, self._small_turns() < self._executor.small.threads
        for transfer in self._order:
            # The first upload begins at once, beside parts in flight of others; later uploads use the remaining requests.
            busy = transfer.large_leaving if transfer is self._order[0] else self._large_leaving
            if (item := transfer.take(large=busy < limit, small=small)) is not None:
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

    async def _carry(self, transfer: FileTransfer, item: WorkItem) -> None:
        try:
            await transfer.carry(item)
        except StoreError as error:
            if transfer.retry_gate.behind and not isinstance(error, NotFound | AlreadyExists | TooLarge | CorruptObject):
                transfer.put_back(item, rest_s=AGAIN_S)
                asyncio.get_running_loop().call_later(AGAIN_S, self.pump)
            else:
                transfer.fail(error)
        except Exception as error:
            transfer.fail(error)
        finally:
            self._count(transfer, item, -1)
            if item.hedged is not None and item.hedged.has_second:
                self._in_flight -= 1
            item.hedged = None
            self._left(transfer, item)
            transfer.wake()
            self.pump()

    def _count(self, transfer: FileTransfer, item: WorkItem, change: int) -> None:
        self._in_flight += change * item.at_once
        transfer.places += change * item.at_once
        transfer.in_flight += change
        if item.is_large:
            (transfer.large_in_flight.add if change > 0 else transfer.large_in_flight.discard)(item)
        elif item.is_local:
            transfer.local_in_flight += change
        else:
            self._turn(item, begins=change > 0)

    def _turn(self, item: WorkItem, *, begins: bool) -> None:
        if begins:
            self._small_began_s[item] = time.monotonic()
            asyncio.get_running_loop().call_later(LATE_S * 1.1, self.pump)  # if it is late, another may begin
        else:
            del self._small_began_s[item]

    def _small_turns(self) -> int:
        """Return how many threads send small files, but for those that hang on an answer."""
        late_s = time.monotonic() - LATE_S
        return sum(began_s > late_s for began_s in self._small_began_s.values())

    def _leaves(self, transfer: FileTransfer, item: WorkItem) -> None:
        item.is_leaving = item.is_large
        if not item.is_leaving:
            return
        loop = asyncio.get_running_loop()
        item.on_left = functools.partial(loop.call_soon_threadsafe, self._left_early, transfer, item)
        self._leaving[item] = transfer, Progress()
        self._count_leaving(transfer, 1)

    def _left_early(self, transfer: FileTransfer, item: WorkItem) -> None:
        if item.is_leaving:
            self._left(transfer, item)
            self.pump()

    def _left(self, transfer: FileTransfer, item: WorkItem) -> None:
        if item.is_leaving:
            item.is_leaving = False
            del self._leaving[item]
            self._count_leaving(transfer, -1)

    def _count_leaving(self, transfer: FileTransfer, change: int) -> None:
        self._large_leaving += change
        transfer.large_leaving += change
