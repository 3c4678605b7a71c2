"""HTTP transport of small requests: aiobotocore's, with late requests hedged, answers bounded and silent connections reset.

A request may arrive twice. It has to be idempotent, or handle its second answer (``Call.unwanted``). ``core/schedule/hedging``
decides when a request is late; the measurements and the budget of hedges (``Pulse``) are shared with the wire of bodies.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import aiohttp
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.httpsession import AIOHTTPSession
from aiohttp.client_proto import ResponseHandler
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError, ProxyConnectionError

from sidecar.core.schedule import hedging
from sidecar.store.http.dial import CannotConnect
from sidecar.store.http.wire import MAX_ERROR_BYTES, AnswerTooLong, Wire
from sidecar.store.s3.attempt import Attempt, Call, Handler, origin_of
from sidecar.store.s3.hedged import HedgedCall

AGAIN, AGAIN_IN_S = frozenset({500, 502, 503, 504}), 0.2
"""Statuses that are retried once, and the delay in seconds."""
LARGE_BYTES = 1 << 20
"""Documents from this size on are sent in blocks."""
KEEP_S = 60.0
"""Time for which an idle connection is kept, in seconds."""


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


class _Connector(aiohttp.TCPConnector):
    """Connections that an ``Attempt`` can reset. An attempt that wants a new one closes the idle ones first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = functools.partial(Handler, loop=self._loop)  # type: ignore[assignment]  # a subclass
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:  # noqa: ASYNC109
        attempt = _attempt.get()
        while True:
            connection = await super().connect(req, traces, timeout)
            handler = connection.protocol
            assert isinstance(handler, Handler)
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
        proxy = self._proxy_of(origin_of(url))
        return None if proxy is None else f"http://{proxy.host}:{proxy.port}"

    def proxy_headers_for(self, url: str) -> dict[str, str]:
        proxy = self._proxy_of(origin_of(url))
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
        answer = await HedgedCall(self, request, call).answer()
        if answer.status_code in AGAIN:
            await asyncio.sleep(AGAIN_IN_S)
            answer = await HedgedCall(self, request, call).answer()
        call.headers, call.content = answer.headers, answer._content
        return answer

    async def try_once(self, request: Any, attempt: Attempt) -> AioAWSResponse:
        """Send a request over one connection, and return the answer with its body."""
        _attempt.set(attempt)
        mine = copy.copy(request)
        mine.stream_output = True  # the body is read here, up to a limit
        if request.body is not None and len(request.body) >= LARGE_BYTES:
            mine.body = io.BytesIO(request.body)  # sent in blocks: the loop serves others between them
        proxy = self.wire.proxy(origin_of(request.url))
        if proxy is not None and request.url.startswith("http:"):
            mine.headers = {**dict(request.headers.items()), **proxy.headers}
        try:
            answer = await super().send(mine)
        except (EndpointConnectionError, ProxyConnectionError) as error:
            if proxy is None:
                raise
            raise CannotConnect(f"the proxy {proxy.host}:{proxy.port}: {error.kwargs['error']}") from None
        _acknowledge(answer)
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


def _acknowledge(answer: AioAWSResponse) -> None:
    """Acknowledge the head of an answer at once: some servers send the body only then, and the kernel would wait for 40 ms."""
    connection = answer.raw.connection
    if connection is not None and connection.transport is not None:
        connection.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


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
