"""HTTP transport of small requests: aiobotocore's, with late requests hedged, answers bounded and silent connections reset.

A request may arrive twice. It has to be idempotent, or handle its second answer (``Call.unwanted``). ``core/schedule/hedging``
decides when a request is late; the measurements and the budget of hedges (``Pulse``) are shared with the wire of bodies.
"""

from __future__ import annotations

import asyncio
import copy
import fcntl
import functools
import io
import socket
import ssl
import struct
import termios
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from http.client import BadStatusLine, HTTPException
from typing import Any, ClassVar

import aiohttp
import structlog
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from aiohttp.client_proto import ResponseHandler
from botocore.exceptions import ConnectionClosedError, ProxyConnectionError

from sidecar.core.schedule import hedging
from sidecar.store.http.answer import MAX_INTERIM_ANSWERS
from sidecar.store.http.link import TICK_S
from sidecar.store.http.wire import MAX_ANSWER_BYTES, MAX_ERROR_BYTES, AnswerTooLong, CannotConnect, Wire

log = structlog.get_logger()

AGAIN, AGAIN_IN_S = frozenset({500, 502, 503, 504}), 0.2
"""Statuses that are retried once, and the delay in seconds."""
CONFLICT = 409
"""Status where two tries of one conditional write collided in the store."""
MAX_SMALL_BYTES = 1 << 20
"""Maximum length of an answer that is no document and no listing."""
MAX_HEAD_BYTES = 1 << 20
"""Maximum length of heads, interim answers and trailers, and of what arrives while a body is found to be too long."""
LARGE_BYTES = 1 << 20
"""Documents from this size on are sent in blocks."""
MIN_WAIT_S = 0.05
"""Shortest wait for an answer between two decisions about a hedge, in seconds."""
KEEP_S = 60.0
"""Time for which an idle connection is kept, in seconds."""
OPERATION = "ckpt_operation"
"""Key of the operation's name in a request's context."""
_LONG = frozenset({"ListObjectsV2", "ListParts", "ListMultipartUploads", "GetObject", "DeleteObjects"})
_ABORTIVE = struct.pack("ii", 1, 0)
_HTTP = b"HTTP/"


@dataclass
class Call:
    """Limits of one request that differ from the usual ones; and its answer's head and body."""

    most_bytes: int | None = None
    """Maximum length of the answer; ``None``: that of its operation."""
    within_s: float | None = None
    """Deadline for the answer in seconds after the request was sent, without hedging; ``None``: the store's, with hedging."""
    unwanted: Callable[[bytes], Awaitable[object]] | None = None
    """Awaited with the body of a second successful answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""


_call: ContextVar[Call] = ContextVar("call")
_attempt: ContextVar[Attempt] = ContextVar("attempt")


@contextmanager
def limits(call: Call) -> Iterator[Call]:
    """Apply ``call`` to the requests that this task makes inside."""
    before = _call.set(call)
    try:
        yield call
    finally:
        _call.reset(before)


class Attempt:
    """One try of a request: the request on one connection. Times are monotonic seconds."""

    task: asyncio.Task[AioAWSResponse]

    def __init__(self, *, is_fresh: bool, most_bytes: int) -> None:
        self.is_fresh = is_fresh
        """It must not use a connection that was used before."""
        self.is_hedge = False
        self.most_bytes = most_bytes
        self.began_s = time.monotonic()
        self.sent_s = 0.0
        """When a connection was there and the request began to leave; 0: not yet."""
        self.is_new = True
        """Its connection was made for it."""
        self._handler: _Handler | None = None
        self._moved_bytes = 0
        self._queued_bytes: int | None = None
        self._queued_s = 0.0

    def connected(self, handler: _Handler, *, is_new: bool) -> None:
        """Take a connection."""
        handler.begin(self.most_bytes + MAX_HEAD_BYTES)
        self._handler, self.is_new, self.sent_s = handler, is_new, time.monotonic()

    def answered(self) -> None:
        """Give the connection up to others: the answer was read to its end."""
        self._handler = None

    def is_moving(self, now_s: float) -> bool:
        """Whether the request is still leaving, or its answer arriving, faster than the floor on progress."""
        if self._handler is None or self._handler.transport is None:
            return False
        if self._handler.received_bytes - self._moved_bytes >= hedging.LEAST_MOVED_BYTES:
            self._moved_bytes = self._handler.received_bytes
            return True
        queued_bytes, before = _queued_bytes(self._handler.transport), self._queued_bytes
        is_leaving = before is not None and hedging.is_moving(before - queued_bytes, in_s=now_s - self._queued_s)
        if is_leaving or before is None:
            self._queued_bytes, self._queued_s = queued_bytes, now_s
        return is_leaving

    def give_up(self) -> None:
        """End it by a reset, so that nothing of the request leaves later."""
        if self._handler is not None and (transport := self._handler.transport) is not None:
            with suppress(OSError):
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTIVE)
            transport.abort()
        self.task.cancel()


def _queued_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that the peer has not acknowledged."""
    try:
        raw = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return transport.get_write_buffer_size() + int(struct.unpack("i", raw)[0])


class _Handler(ResponseHandler):
    """A connection whose answer may not be longer than agreed, with its heads, interim answers and trailers."""

    received_bytes = 0
    _most_bytes = MAX_HEAD_BYTES
    _interim_answers = 0
    transport: asyncio.Transport | None

    def begin(self, most_bytes: int) -> None:
        """Start the next answer."""
        self.received_bytes, self._most_bytes, self._interim_answers = 0, most_bytes, 0

    def data_received(self, data: bytes) -> None:
        if data and self.received_bytes == 0 and data[: len(_HTTP)] != _HTTP[: len(data)]:
            self._refuse(BadStatusLine(repr(data[:50])))
            return
        self.received_bytes += len(data)
        if self.received_bytes > self._most_bytes:
            self._refuse(HTTPException(f"an answer of more than {self._most_bytes} bytes, with its heads and trailers"))
            return
        super().data_received(data)

    def feed_data(self, data: Any, *size: int) -> None:
        self._interim_answers += data[0].code < 200
        if self._interim_answers > MAX_INTERIM_ANSWERS:
            self._refuse(HTTPException(f"more than {MAX_INTERIM_ANSWERS} interim answers"))
        else:
            super().feed_data(data, *size)

    def _refuse(self, error: Exception) -> None:
        self.set_exception(error)
        if self._payload is not None:
            self._payload.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


class _Connector(aiohttp.TCPConnector):
    """Connections that an ``Attempt`` can reset. An attempt that wants a new one closes the idle ones first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = functools.partial(_Handler, loop=self._loop)  # type: ignore[assignment]  # a subclass
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:  # noqa: ASYNC109
        attempt = _attempt.get()
        while True:
            connection = await super().connect(req, traces, timeout)
            handler = connection.protocol
            assert isinstance(handler, _Handler)
            is_new = handler not in self._used
            if is_new or not attempt.is_fresh:
                break
            connection.close()  # silent, as the one beside it most likely
        self._used.add(handler)
        attempt.connected(handler, is_new=is_new)
        return connection


class _Direct:
    """A session that follows no redirect: what it leads to is not the store, and the signature is not for it."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> aiohttp.ClientResponse:
        return await self._session.request(method, allow_redirects=False, **options)


class _Proxies:
    """Proxies in botocore's form. aiohttp gets their user and password as a header: it repeats URLs in errors."""

    def __init__(self, wire: Wire) -> None:
        self._proxy_of = wire.proxy

    def proxy_url_for(self, url: str) -> str | None:
        proxy = self._proxy_of(_origin_of(url))
        return None if proxy is None else f"http://{proxy.host}:{proxy.port}"

    def proxy_headers_for(self, url: str) -> dict[str, str]:
        proxy = self._proxy_of(_origin_of(url))
        return {} if proxy is None else dict(proxy.headers)


class Transport(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """What aiobotocore sends requests with. Subclasses say whose: ``of``."""

    wire: ClassVar[Wire]
    tls: ClassVar[ssl.SSLContext]
    connect_timeout_s: ClassVar[float]

    @classmethod
    def of(cls, wire: Wire, *, tls: ssl.SSLContext, connect_timeout_s: float) -> type[Transport]:
        """Return the class for one store, whose bodies go over ``wire``. Times in seconds."""
        return type("Transport", (cls,), {"wire": wire, "tls": tls, "connect_timeout_s": connect_timeout_s})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Deadlines are set here, because they depend on what other connections do.
        self._timeout = aiohttp.ClientTimeout()
        self._proxy_config = _Proxies(self.wire)
        self._failures = 0
        self._listening: set[asyncio.Task[None]] = set()

    async def _create_connector(self, proxy_url: str | None) -> aiohttp.TCPConnector:
        return _Connector(limit=0, ssl=self.tls, keepalive_timeout=KEEP_S)

    async def _get_session(self, proxy_url: str | None) -> _Direct:
        return _Direct(await super()._get_session(proxy_url))

    async def send(self, request: Any) -> AioAWSResponse:
        """Send a request, and return its answer with the whole body. A 5xx is retried once.

        Raises:
            HTTPClientError, TimeoutError: No answer, or not a whole one.
            AnswerTooLong: It has more bytes than allowed.
        """
        call = _call.get(None) or Call()
        if isinstance(request.body, io.IOBase):  # each try sends it from its beginning
            request.body = request.body.read()
        answer = await _Course(self, request, call).answer()
        if answer.status_code in AGAIN:
            await asyncio.sleep(AGAIN_IN_S)
            answer = await _Course(self, request, call).answer()
        call.headers, call.content = answer.headers, answer._content
        return answer

    async def try_once(self, request: Any, attempt: Attempt) -> AioAWSResponse:
        """Send a request over one connection, and return the answer with its body."""
        _attempt.set(attempt)
        mine = copy.copy(request)
        mine.stream_output = True  # the body is read here, up to a limit
        if request.body is not None and len(request.body) >= LARGE_BYTES:
            mine.body = io.BytesIO(request.body)  # sent in blocks: the loop serves others between them
        proxy = self.wire.proxy(_origin(request))
        if proxy is not None and request.url.startswith("http:"):
            mine.headers = {**dict(request.headers.items()), **proxy.headers}
        try:
            answer = await super().send(mine)
        except ProxyConnectionError as error:
            raise CannotConnect(
                f"the proxy {proxy.host}:{proxy.port}: {error.kwargs['error']}" if proxy else "a proxy"
            ) from None
        try:
            answer._content = await _content(answer, attempt.most_bytes)
        except aiohttp.ClientError as error:
            raise ConnectionClosedError(error=error, endpoint_url=request.url) from error
        finally:
            attempt.answered()
            answer.raw.close()
        return answer

    def connect_within_s(self) -> float:
        """Return the deadline of connecting, in seconds."""
        return hedging.connect_within_s(self._failures, first_s=self.connect_timeout_s, most_s=self.wire.pulse.most_s)

    def connected(self, *, succeeded: bool) -> None:
        """Record whether a connection could be made in time."""
        self._failures = 0 if succeeded else self._failures + 1

    def listen(self, attempt: Attempt, unwanted: Callable[[bytes], Awaitable[object]]) -> None:
        """Wait in the background for a superseded try's answer, and hand its body to ``unwanted``."""

        async def listen() -> None:
            try:
                async with asyncio.timeout(self.wire.pulse.most_s):
                    answer = await attempt.task
            except Exception:  # a silent connection, or none: nothing to undo
                attempt.give_up()
                return
            if answer.status_code < 300:
                await unwanted(answer._content)

        task = asyncio.create_task(listen())
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)


async def _content(answer: AioAWSResponse, most_bytes: int) -> bytes:
    """Read a body to its end; of an error, the beginning.

    Raises:
        AnswerTooLong: A success has more than ``most_bytes``.
    """
    is_error, declared = answer.status_code >= 300, answer.raw.content_length
    most_bytes = MAX_ERROR_BYTES if is_error else most_bytes
    if not is_error and (declared or 0) > most_bytes:
        raise AnswerTooLong(answer.headers, declared, most_bytes)
    content = bytearray()
    while block := await answer.raw.content.readany():
        content += block
        if len(content) > most_bytes:
            if is_error:
                break
            raise AnswerTooLong(answer.headers, None, most_bytes)
    return bytes(content)


class _Course:
    """One request and its answer, over one or more connections. Times are monotonic seconds."""

    def __init__(self, transport: Transport, request: Any, call: Call) -> None:
        self._transport = transport
        self._pulse = transport.wire.pulse
        self._request = request
        self._call = call
        self._operation: str = (request.context or {}).get(OPERATION, "")
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
                    timeout=max(MIN_WAIT_S, min(TICK_S, self._decide_s() - time.monotonic())),
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
        attempt.task.add_done_callback(_look_at_error)
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
        may_be_undone = answer.status_code >= 500 or answer.status_code == CONFLICT
        if may_be_undone and self._held is None and self._waiting:
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
        if not self._pulse.begin_hedge(waiting_since_s=self._latest_s, now_s=now_s):
            return
        self._pulse.quiet.fell_silent(since_s=self._latest_s, now_s=now_s)
        log.info("store_request_hedged", kind=self._operation, waited_s=round(now_s - self._latest_s, 2))
        if len(self._waiting) >= hedging.AT_ONCE:
            superseded = self._waiting.pop(1)  # the first try is kept: a slow store will answer it
            self._release(superseded)
            superseded.give_up()
        self._begin(is_fresh=True).is_hedge = True

    def _check_deadline(self, now_s: float) -> None:
        if not any(attempt.sent_s for attempt in self._waiting):
            within_s = self._transport.connect_within_s()
            if now_s - self._moved_s >= within_s:
                self._transport.connected(succeeded=False)
                self._pulse.quiet.fell_silent(since_s=self._moved_s, now_s=now_s)
                raise TimeoutError(f"{_origin(self._request)}: no connection within {within_s:g} s")
        elif now_s - self._moved_s >= (self._call.within_s or self._pulse.most_s):
            self._pulse.quiet.fell_silent(since_s=self._moved_s, now_s=now_s)
            raise TimeoutError(f"{_origin(self._request)}: no answer for {now_s - self._moved_s:.0f} s")

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


def _look_at_error(task: asyncio.Task[Any]) -> None:
    """Prevent a log line about the error of a try that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _origin(request: Any) -> str:
    return _origin_of(request.url)


def _origin_of(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])
