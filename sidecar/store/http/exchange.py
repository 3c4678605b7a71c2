"""One request and its answer, over one or more connections.

* A kept-alive connection that the server has closed is replaced.
* A connection that falls silent while a body is sent is replaced, and the body is sent again.
* A request whose answer is late is hedged: it is sent over another connection too, and the first answer wins.

A request may therefore arrive twice. It has to be idempotent: objects and parts are, whose bytes are the same. A conditional
one may be refused because of its own first try.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException

import structlog

from sidecar.core.schedule import hedging
from sidecar.errors import CheckpointChanged
from sidecar.store.http.answer import Connection, HeadReader, OpenAnswer
from sidecar.store.http.dial import NotNeeded
from sidecar.store.http.link import TICK_S, Place, Silent
from sidecar.store.http.tries import AnswerGate, HedgeState, Try, Watcher, any_is_answered
from sidecar.store.http.wire import Request, Wire
from sidecar.store.slice import FileSlice

log = structlog.get_logger()

LOST = (BrokenPipeError, ConnectionResetError, ConnectionAbortedError, http.client.RemoteDisconnected)
LARGE_BYTES = 1 << 20
"""Requests with a body from this size on have latency statistics of their own."""


class Exchange:
    """A request and its answer, see the module's docstring. Call ``end`` when done. One thread at a time."""

    def __init__(self, wire: Wire, request: Request) -> None:
        self.origin, target = split(request.url)
        self._wire = wire
        self._pulse = wire.pulse
        self._request = request
        self._head = wire.head(self.origin, target, request)
        self._tries: list[Try] = []
        """Tries in flight, oldest first."""
        self._places = 0
        """Slots of the hedge budget held by connections that fell silent."""
        self._answer: OpenAnswer | None = None

    def send(self) -> None:
        """Send the whole request.

        Raises:
            TimeoutError: Several connections in a row fell silent.
            OSError, HTTPException: No connection could be made, or a new one was lost.
        """
        self._send(self._wire.take_idle(self.origin))

    def _send(self, connection: Connection | None) -> None:
        silent_s, silences = 0.0, self._request.silences
        while True:
            attempt = self._begun(connection, silences=silences)
            connection = None
            try:
                self._answer = self._send_over(attempt)
                return
            except Silent as silent:
                silences, silent_s = silences + 1, silent_s + silent.seconds
                self._give_up(attempt)
                if silent_s >= self._pulse.most_s:
                    raise TimeoutError(str(silent)) from None
                log.info("store_connection_silent", store=self.origin, silent_s=round(silent.seconds, 2))
            except LOST:  # a kept-alive connection that the server closed: retry on a new one
                if attempt.is_new:
                    raise
                self._give_up(attempt)

    def answer(self) -> OpenAnswer:
        """Wait for the head of the answer.

        Raises:
            TimeoutError: It does not arrive.
            OSError, HTTPException: All connections were lost.
        """
        if self._answer is None:
            attempt = self._tries[0]
            try:
                self._answer = self._taken(attempt, attempt.head(self._request.method))
            except BlockingIOError:
                self._answer = self._hedged()
            except LOST:
                if attempt.is_new:
                    raise
                self._give_up(attempt)
                self._send(None)
                return self.answer()
        return self._answer

    def end(self) -> None:
        """Return the connections to the pool; abandon the tries without an answer."""
        for attempt in list(self._tries):
            if self._answer is None:
                self._give_up(attempt)
            elif attempt.is_answered:
                self._tries.remove(attempt)
                self._places += attempt.connection.link.holds_place
                self._end_place(attempt)
                self._wire.give_back(self.origin, attempt.connection, kept=self._answer.leaves_connection_usable)
            else:
                self._give_up(attempt)
        self._leave_places(but=0)

    def _leave_places(self, *, but: int) -> None:
        while self._places > but:
            self._places -= 1
            self._pulse.end_hedge()

    def _begun(self, connection: Connection | None, *, silences: int, unless: Callable[[], bool] = lambda: False) -> Try:
        """Start a try over ``connection``; ``None``: over a new one. Raises as ``Wire.dial``."""
        is_new = connection is None
        if connection is None:
            connection = self._wire.dial(self.origin, unless=unless)
        # During long operations (completing an upload, copying), stores send a space now and then as a keep-alive.
        connection.link.begin(silences, may_trickle=self._request.method != "GET")
        attempt = Try(connection, self._request.body, is_new=is_new)
        self._tries.append(attempt)
        return attempt

    def _give_up(self, attempt: Try) -> None:
        self._tries.remove(attempt)
        self._places += attempt.connection.link.holds_place
        self._leave_places(but=1)  # the connection in its place
        self._end_place(attempt)
        if not attempt.is_new:
            self._wire.drop_idle(self.origin)  # other idle connections may be dead for the same reason
        self._wire.abandon(attempt.connection)

    def _end_place(self, attempt: Try) -> None:
        if attempt.is_hedge:
            self._pulse.end_hedge(is_whole_body=self._is_body)

    def _send_over(self, attempt: Try) -> OpenAnswer | None:
        """Send the whole request. Returns the answer if the store gave it before all was sent, else ``None``."""
        try:
            self._wire.send_over(attempt.connection, self._head, attempt.body)
        except (BrokenPipeError, ConnectionResetError):
            # The store answered, usually with an error, before it read the whole body: that answer can still be read.
            answer = HeadReader(attempt.connection, self._request.method).read()
            answer.end_connection()
            attempt.is_answered = True
            return answer
        attempt.sent_s = time.monotonic()
        return None

    def _taken(self, attempt: Try, answer: OpenAnswer) -> OpenAnswer:
        """Record the latency of the answer that wins, and return it.

        Raises:
            CheckpointChanged: The tries sent different bytes: the file was written to meanwhile.
        """
        now_s, body = time.monotonic(), self._request.body
        self._pulse.quiet.heard_s = now_s
        if attempt.sent_s:
            self._pulse.latencies.took(self._latency_kind, now_s - attempt.sent_s)
        if attempt.sent_s and _checksum(attempt.body) != _checksum(body):
            raise CheckpointChanged(body.name if isinstance(body, FileSlice) else self.origin)
        return answer

    @property
    def _kind(self) -> str:
        return f"{self._request.kind} large" if self._has_large_body else self._request.kind

    @property
    def _latency_kind(self) -> str:
        its_class = hedging.size_class(self._body_bytes)
        return f"{self._request.kind} {its_class}" if self._is_body else self._request.kind

    @property
    def _body_bytes(self) -> int:
        return 0 if self._request.body is None else len(self._request.body)

    @property
    def _is_body(self) -> bool:
        return self._body_bytes >= hedging.BULK_BYTES

    @property
    def _has_large_body(self) -> bool:
        return self._body_bytes >= LARGE_BYTES

    def _hedged(self) -> OpenAnswer:
        """Wait for the first answer; hedge the request while it is late."""
        state = HedgeState(self._tries[0].sent_s)
        while True:
            self._hedge_if_late(state)
            if state.held is not None and (time.monotonic() >= state.hold_until_s or not self._waiting()):
                return self._taken(*state.held)
            if not self._waiting():
                raise state.error or TimeoutError(self.origin)
            if not any_is_answered(self._waiting(), min(TICK_S, state.left_s())):
                continue
            for attempt in self._waiting():
                answer = self._heard(attempt, state)
                if answer is None:
                    continue
                if not hedging.may_be_undone(answer.status) or state.held is not None or not self._waiting():
                    return self._taken(attempt, answer)
                state.hold(attempt, answer)

    def _hedge_if_late(self, state: HedgeState) -> None:
        """Start another try if the latest one is late, or if none is left.

        Raises:
            TimeoutError: The deadline of the request has passed.
        """
        now_s = time.monotonic()
        if sum(attempt.is_leaving(now_s) for attempt in self._waiting()):
            state.latest_s = state.moved_s = now_s
            self._pulse.quiet.heard_s = now_s
        waited_s, heard_s_ago = now_s - state.moved_s, now_s - self._pulse.quiet.heard_s
        if hedging.is_given_up(waited_s, most_s=self._pulse.most_s, is_body=self._is_body, heard_s_ago=heard_s_ago):
            self._pulse.quiet.fell_silent(since_s=state.moved_s, now_s=now_s)
            raise TimeoutError(f"{self.origin}: no answer for {waited_s:.0f} s")
        # A relay on a slow link may buffer the end of a body: it has left this machine and not reached the store.
        step_s = self._pulse.step_s(now_s) if self._has_large_body else 0.0
        state.next_s = state.latest_s + hedging.next_try_s(
            max(step_s, self._pulse.late_s(self._latency_kind)),
            tries=state.begun,
            quiet_before_s=self._pulse.quiet.before_s(state.latest_s),
            most_s=hedging.BODY_MOST_S if self._is_body else self._pulse.most_s,
            is_costly=self._is_body,
        )
        waiting = self._waiting()
        if not waiting and state.held is None and not state.has_new:
            self._try_again(state)
        elif waiting and state.held is None and now_s >= state.next_s:
            place = self._pulse.place_of_hedge(
                waiting,
                at_once=hedging.at_once(is_costly=self._is_body),
                waiting_since_s=state.latest_s,
                now_s=now_s,
                is_whole_body=self._is_body,
            )
            if place is not None:
                self._hedge(state, place, now_s)

    def _hedge(self, state: HedgeState, place: Place[Try], now_s: float) -> None:
        self._pulse.quiet.fell_silent(since_s=state.latest_s, now_s=now_s)
        log.info("store_request_hedged", store=self.origin, kind=self._kind, waited_s=round(now_s - state.latest_s, 2))
        if not self._waiting()[0].is_new:
            self._wire.drop_idle(self.origin)
        if place.replaced is not None:
            self._give_up(place.replaced)
        self._try_again(state, is_hedge=True)

    def _try_again(self, state: HedgeState, *, is_hedge: bool = False) -> None:
        """Send the request over a new connection, in parallel to the tries in flight."""
        try:
            answer = self._sent_again(is_hedge=is_hedge)
        except NotNeeded:
            return
        except (OSError, HTTPException) as error:
            state.error = error
        else:
            if answer is not None:
                state.hold(self._tries[-1], answer)
        state.begun, state.has_new, state.latest_s = state.begun + 1, True, time.monotonic()

    def _sent_again(self, *, is_hedge: bool) -> OpenAnswer | None:
        body, others = self._request.body, self._waiting()
        try:
            attempt = self._begun(None, silences=self._request.silences, unless=lambda: any_is_answered(others))
        except BaseException:
            if is_hedge:
                self._pulse.end_hedge(is_whole_body=self._is_body)
            raise
        attempt.is_hedge = is_hedge
        if isinstance(body, FileSlice):
            gate = AnswerGate(body.gate, lambda: any_is_answered(others))
            attempt.body = FileSlice(body.fd, body.offset, body.size_bytes, gate=gate, name=body.name)
        try:
            return self._send_over(attempt)
        except (OSError, HTTPException, NotNeeded):
            self._give_up(attempt)
            raise

    def _heard(self, attempt: Try, state: HedgeState) -> OpenAnswer | None:
        """Return the head of a try's answer, or ``None`` if it has none yet or its connection was lost."""
        if not Watcher(attempt.connection).readable():
            return None
        try:
            return attempt.head(self._request.method)
        except BlockingIOError:
            return None
        except (OSError, HTTPException) as error:
            state.error = error
            state.has_new = state.has_new or not isinstance(error, LOST) or attempt.is_new
            self._give_up(attempt)
            return None

    def _waiting(self) -> list[Try]:
        return [attempt for attempt in self._tries if not attempt.is_answered and attempt.sent_s]


@contextmanager
def sent(wire: Wire, request: Request) -> Iterator[Callable[[], OpenAnswer]]:
    """Send a request with its body; the function yielded waits for the answer. Other requests can be sent meanwhile.

    A connection whose answer was not read to its end is closed.
    """
    exchange = Exchange(wire, request)
    try:
        exchange.send()
        yield exchange.answer
    finally:
        exchange.end()


def _checksum(body: FileSlice | bytes | None) -> int | None:
    return body.crc64nvme if isinstance(body, FileSlice) else None


def split(url: str) -> tuple[str, str]:
    """Return ``scheme://host:port`` of an absolute URL, and its path with the query."""
    slash = url.index("/", url.index("://") + 3)
    return url[:slash], url[slash:]
