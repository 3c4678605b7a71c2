"""One stream of work for the link: pieces of all checkpoints, in the order of the queue, as many at once as pay off."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence

from sidecar.core.backoff import delay_s
from sidecar.errors import AlreadyExists, CorruptObject, NotFound, StoreError
from sidecar.transfer import Transfers
from sidecar.upload.pieces import Piece
from sidecar.upload.sending import Sending

AGAIN_S = delay_s(5, random_0_1=1.0)
"""How long a piece that failed while something else went first is left alone."""


class Stream:
    """Small requests may use all that is allowed, large ones only the number that was found to be fast.

    A large one counts until its last byte has left: while its answer is on the way, the next uses the link.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._order: list[Sending] = []
        self._strictly = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._large_leaving = 0

    def reorder(self, order: Sequence[Sending], *, strictly: bool = False) -> None:
        """Change what goes first. Pieces under way are finished; further ones are taken in the new order.

        Args:
            order: All that may be sent.
            strictly: The next begins when the last answer to the one before is there, not when its last piece has begun: what
                was lost on the way and is sent again would have to share the link.
        """
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

    def _take(self) -> tuple[Sending, Piece] | None:
        if self._in_flight >= self._transfers.most:
            return None
        limit = self._transfers.adapted.limit
        for sending in self._order:
            # The first may begin at once although parts of another are still under way; those behind use what is left.
            busy = sending.large_leaving if sending is self._order[0] else self._large_leaving
            if (piece := sending.take(large=busy < limit)) is not None:
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
            self._left(sending, piece)
            sending.wake()
            self.pump()

    def _count(self, sending: Sending, piece: Piece, change: int) -> None:
        self._in_flight += change
        sending.in_flight += change
        if piece.is_large:
            sending.large_in_flight += change
        elif piece.is_local:
            sending.local_in_flight += change

    def _leaves(self, sending: Sending, piece: Piece) -> None:
        piece.is_leaving = piece.is_large
        if not piece.is_leaving:
            return
        loop = asyncio.get_running_loop()
        piece.on_left = functools.partial(loop.call_soon_threadsafe, self._left_early, sending, piece)
        self._count_leaving(sending, 1)

    def _left_early(self, sending: Sending, piece: Piece) -> None:
        if piece.is_leaving:
            self._left(sending, piece)
            self.pump()

    def _left(self, sending: Sending, piece: Piece) -> None:
        if piece.is_leaving:
            piece.is_leaving = False
            self._count_leaving(sending, -1)

    def _count_leaving(self, sending: Sending, change: int) -> None:
        self._large_leaving += change
        sending.large_leaving += change
