"""One small request and its answer, over one or more connections: hedged while it is late, within its deadline."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import structlog
from aiobotocore.awsrequest import AioAWSResponse

from sidecar.core.schedule import hedging
from sidecar.store.http.link import TICK_S
from sidecar.store.http.wire import MAX_ANSWER_BYTES, AnswerTooLong
from sidecar.store.s3.attempt import Attempt, Call, origin_of

if TYPE_CHECKING:
    from sidecar.store.s3.transport import Transport

log = structlog.get_logger()

MAX_SMALL_BYTES = 1 << 20
"""Maximum length of an answer that is no document and no listing."""
OPERATION = "ckpt_operation"
"""Key of the operation's name in a request's context."""
_LONG = frozenset({"ListObjectsV2", "ListParts", "ListMultipartUploads", "GetObject", "DeleteObjects"})


class HedgedCall:
    """One request and its answer, over one or more connections. Times are monotonic seconds."""

    def __init__(self, transport: Transport, request: Any, call: Call) -> None:
        self._transport = transport
        self._pulse = transport.wire.pulse
        self._request = request
        self._call = call
        self._operation: str = (request.context or {}).get(OPERATION, "")
        self._is_costly = self._operation in hedging.COSTLY
        self._most_bytes = call.most_bytes or (MAX_ANSWER_BYTES if self._operation in _LONG else MAX_SMALL_BYTES)
        self._waiting: list[Attempt] = []
        self._begun = 0
        self._latest_s = self._moved_s = time.monotonic()
        """When the latest try was sent, or something moved last; when something moved last."""
        self._has_new = False
        """A try had a new connection. If that is lost too, the cause is not a stale connection."""
        self._held: AioAWSResponse | None = None
        """An error answer, returned unless another try succeeds before ``_hold_until_s``."""
        self._hold_until_s = 0.0
        self._error: Exception | None = None
        self._is_sent = self._is_answered = False

    async def answer(self) -> AioAWSResponse:
        """Return the first answer; hedge the request while it is late. Raises as ``Transport.send``."""
        self._pulse.calls += 1
        try:
            self._begin(is_fresh=False)
            while True:
                done, _ = await asyncio.wait(
                    [attempt.task for attempt in self._waiting],
                    timeout=max(hedging.MIN_WAIT_S, min(TICK_S, self._decide_s() - time.monotonic())),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for attempt in [attempt for attempt in self._waiting if attempt.task in done]:
                    if (answer := self._ended(attempt)) is not None:
                        return self._won(answer)
                now_s = time.monotonic()
                if self._held is not None and (now_s >= self._hold_until_s or not self._waiting):
                    return self._won(self._held)
                if not self._waiting:
                    if self._has_new and self._error is not None:
                        raise self._error
                    self._begin(is_fresh=True)
                self._hedge_if_late(now_s)
        finally:
            self._pulse.calls -= 1
            self._end()

    def _begin(self, *, is_fresh: bool) -> Attempt:
        attempt = Attempt(is_fresh=is_fresh, most_bytes=self._most_bytes)
        attempt.task = asyncio.create_task(self._transport.try_once(self._request, attempt))
        attempt.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may have no reader
        self._waiting.append(attempt)
        self._begun += 1
        self._latest_s = time.monotonic()
        return attempt

    def _ended(self, attempt: Attempt) -> AioAWSResponse | None:
        """Return the answer of a try that has ended, unless it has none, or one that another try may still undo."""
        self._waiting.remove(attempt)
        self._release(attempt)
        self._has_new = self._has_new or attempt.is_new
        error = attempt.task.exception()
        if isinstance(error, AnswerTooLong) or (error is not None and not isinstance(error, Exception)):
            raise error
        if isinstance(error, Exception):
            self._error = error
            return None
        now_s, answer = time.monotonic(), attempt.task.result()
        self._pulse.quiet.heard_s = now_s
        self._pulse.latencies.took(self._operation, now_s - attempt.sent_s)
        self._transport.connected(succeeded=True)
        if hedging.may_be_undone(answer.status_code) and self._held is None and self._waiting:
            self._held, self._hold_until_s = answer, now_s + hedging.HOLD_S
            return None
        return answer

    def _won(self, answer: AioAWSResponse) -> AioAWSResponse:
        self._is_answered = True
        return answer

    def _decide_s(self) -> float:
        """Return when the next decision is due."""
        if self._held is not None:
            return self._hold_until_s
        is_sent = any(attempt.sent_s for attempt in self._waiting)
        return self._latest_s + hedging.next_try_s(
            self._pulse.late_s(self._operation if is_sent else "connect"),
            tries=self._begun,
            quiet_before_s=self._pulse.quiet.before_s(self._latest_s),
            most_s=self._pulse.most_s,
            is_costly=self._is_costly,
        )

    def _hedge_if_late(self, now_s: float) -> None:
        """Start another try if the latest one is late.

        Raises:
            TimeoutError: The deadline of the request has passed.
        """
        sent_s = max((attempt.sent_s for attempt in self._waiting), default=0.0)
        self._latest_s = max(self._latest_s, sent_s)
        if sent_s and not self._is_sent:  # connected meanwhile: the wait for the answer begins
            self._is_sent, self._moved_s = True, sent_s
        if sum(attempt.is_moving(now_s) for attempt in self._waiting):
            self._latest_s = self._moved_s = self._pulse.quiet.heard_s = now_s
        self._check_deadline(now_s)
        if self._held is not None or now_s < self._decide_s() or self._call.within_s is not None:
            return
        place = self._pulse.place_of_hedge(
            self._waiting, at_once=hedging.at_once(is_costly=self._is_costly), waiting_since_s=self._latest_s, now_s=now_s
        )
        if place is None:
            return
        self._pulse.quiet.fell_silent(since_s=self._latest_s, now_s=now_s)
        log.info("store_request_hedged", kind=self._operation, waited_s=round(now_s - self._latest_s, 2))
        if place.replaced is not None:
            self._waiting.remove(place.replaced)
            self._release(place.replaced)
            place.replaced.give_up()
        self._begin(is_fresh=True).is_hedge = True

    def _check_deadline(self, now_s: float) -> None:
        if not any(attempt.sent_s for attempt in self._waiting):
            within_s = self._transport.connect_within_s()
            if now_s - self._moved_s >= within_s:
                self._transport.connected(succeeded=False)
                self._pulse.quiet.fell_silent(since_s=self._moved_s, now_s=now_s)
                raise TimeoutError(f"{origin_of(self._request.url)}: no connection within {within_s:g} s")
        elif now_s - self._moved_s >= (self._call.within_s or self._pulse.most_s):
            self._pulse.quiet.fell_silent(since_s=self._moved_s, now_s=now_s)
            raise TimeoutError(f"{origin_of(self._request.url)}: no answer for {now_s - self._moved_s:.0f} s")

    def _release(self, attempt: Attempt) -> None:
        if attempt.is_hedge:
            attempt.is_hedge = False
            self._pulse.end_hedge()

    def _end(self) -> None:
        for attempt in self._waiting:
            self._release(attempt)
            if self._call.unwanted is not None and attempt.sent_s and self._is_answered:
                self._transport.listen(attempt, self._call.unwanted)
            else:
                attempt.give_up()
