"""One stream of work for the link: pieces of all checkpoints, in the order of the queue, as many at once as pay off."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

import structlog

from sidecar.core.backoff import delay_s
from sidecar.core.laggards import Course, is_worth_a_second_try, seen_over_s
from sidecar.errors import AlreadyExists, CorruptObject, NotFound, StoreError
from sidecar.store.slice import BLOCK_BYTES
from sidecar.transfer import Transfers
from sidecar.turns import LATE_S
from sidecar.upload.pieces import Piece
from sidecar.upload.sending import Sending

log = structlog.get_logger()

LOOK_S = 0.1
"""How often the last bytes of a checkpoint are looked at."""
AGAIN_S = delay_s(5, random_0_1=1.0)
"""How long a piece that failed while something else went first is left alone."""


class Stream:
    """Small requests run as many at once as the way to the store has room for, large ones the number that was found to be fast.

    A large one counts until its last byte has left: while its answer is on the way, the next uses the link.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._order: list[Sending] = []
        self._strictly = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._large_leaving = 0
        self._small_began_s: dict[Piece, float] = {}
        self._leaving: dict[Piece, tuple[Sending, Course]] = {}
        self._looking: asyncio.TimerHandle | None = None

    def reorder(self, order: Sequence[Sending], *, strictly: bool = False) -> None:
        """Change what goes first. Pieces under way are finished; further ones are taken in the new order.

        Args:
            order: All that may be sent.
            strictly: The next begins when the last answer to the one before is there, not when its last piece has begun: what
                was lost on the way and is sent again would have to share the link.
        """
        if order[:1] != self._order[:1]:  # what was held meanwhile was not slow
            self._leaving = {piece: (sending, Course()) for piece, (sending, _) in self._leaving.items()}
        self._order, self._strictly = list(order), strictly
        for rank, sending in enumerate(self._order):
            sending.standing.put(behind=rank > 0 and self._order[0].has_more)
        self.pump()

    def pump(self) -> None:
        """Begin as many pieces as may run now."""
        while (taken := self._take()) is not None:
            sending, piece = taken
            self._count(sending, piece, 1)
            self._leaves(sending, piece)
            task = asyncio.create_task(self._carry(sending, piece))
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
        rate = self._transfers.rate()
        if rate is not None and rate.expected > 0 and self._transfers.gate.bytes_per_s is None:
            self._look_for_laggards(rate.expected)
        self._look_later()

    def _look_for_laggards(self, link_bytes_per_s: float) -> None:
        """Begin a second try beside a request of what goes first, where the link has room and the request does not use it."""
        now_s, left = time.monotonic(), {}
        over_s = seen_over_s(requests=len(self._leaving), block_bytes=BLOCK_BYTES, link_bytes_per_s=link_bytes_per_s)
        for piece, (_, course) in self._leaving.items():
            if piece.race is not None and (left_bytes := piece.race.left_bytes) is not None:
                course.saw(left_bytes, now_s=now_s, over_s=over_s)
                left[piece] = left_bytes
        used = [self._leaving[piece][1].bytes_per_s for piece in left]
        for piece, left_bytes in left.items():
            sending, course = self._leaving[piece]
            if sending not in self._order[:1] or piece.race is None or piece.race.has_second:
                continue
            if self._in_flight < self._transfers.most and is_worth_a_second_try(
                left_bytes=left_bytes,
                bytes_per_s=course.bytes_per_s,
                size_bytes=piece.size_bytes,
                others_left_bytes=sum(left.values()) - left_bytes,
                used_bytes_per_s=sum(link_bytes_per_s if rate is None else rate for rate in used),
                link_bytes_per_s=link_bytes_per_s,
            ):
                log.info("part_tried_again", checkpoint=sending.name, number=piece.number, left_bytes=left_bytes)
                self._in_flight += 1
                piece.race.try_again()

    def _take(self) -> tuple[Sending, Piece] | None:
        if self._in_flight >= self._transfers.most:
            return None
        limit, small = self._transfers.adapted.limit, self._small_turns() < self._transfers.small.threads
        for sending in self._order:
            # The first may begin at once although parts of another are still under way; those behind use what is left.
            busy = sending.large_leaving if sending is self._order[0] else self._large_leaving
            if (piece := sending.take(large=busy < limit, small=small)) is not None:
                if piece.is_small:
                    piece.at_once = min(self._transfers.small.at_once, self._transfers.most - self._in_flight)
                return sending, piece
            if sending.has_more and time.monotonic() >= sending.rest_until_s:
                return None
            if self._strictly and sending.in_flight:
                return None
        if self._in_flight == 0:
            self._transfers.adapted = self._transfers.adapted.idle(now_s=time.monotonic())
        return None

    async def _carry(self, sending: Sending, piece: Piece) -> None:
        try:
            await sending.carry(piece)
        except StoreError as error:
            if sending.standing.behind and not isinstance(error, NotFound | AlreadyExists | CorruptObject):
                sending.put_back(piece, rest_s=AGAIN_S)
                asyncio.get_running_loop().call_later(AGAIN_S, self.pump)
            else:
                sending.fail(error)
        except Exception as error:
            sending.fail(error)
        finally:
            self._count(sending, piece, -1)
            if piece.race is not None and piece.race.has_second:
                self._in_flight -= 1
            piece.race = None
            self._left(sending, piece)
            sending.wake()
            self.pump()

    def _count(self, sending: Sending, piece: Piece, change: int) -> None:
        self._in_flight += change * piece.at_once
        sending.places += change * piece.at_once
        sending.in_flight += change
        if piece.is_large:
            (sending.large_in_flight.add if change > 0 else sending.large_in_flight.discard)(piece)
        elif piece.is_local:
            sending.local_in_flight += change
        else:
            self._turn(piece, begins=change > 0)

    def _turn(self, piece: Piece, *, begins: bool) -> None:
        if begins:
            self._small_began_s[piece] = time.monotonic()
            asyncio.get_running_loop().call_later(LATE_S * 1.1, self.pump)  # if it is late, another may begin
        else:
            del self._small_began_s[piece]

    def _small_turns(self) -> int:
        """Return how many threads send small files, but for those that hang on an answer."""
        late_s = time.monotonic() - LATE_S
        return sum(began_s > late_s for began_s in self._small_began_s.values())

    def _leaves(self, sending: Sending, piece: Piece) -> None:
        piece.is_leaving = piece.is_large
        if not piece.is_leaving:
            return
        loop = asyncio.get_running_loop()
        piece.on_left = functools.partial(loop.call_soon_threadsafe, self._left_early, sending, piece)
        self._leaving[piece] = sending, Course()
        self._count_leaving(sending, 1)

    def _left_early(self, sending: Sending, piece: Piece) -> None:
        if piece.is_leaving:
            self._left(sending, piece)
            self.pump()

    def _left(self, sending: Sending, piece: Piece) -> None:
        if piece.is_leaving:
            piece.is_leaving = False
            del self._leaving[piece]
            self._count_leaving(sending, -1)

    def _count_leaving(self, sending: Sending, change: int) -> None:
        self._large_leaving += change
        sending.large_leaving += change
