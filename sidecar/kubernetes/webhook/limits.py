"""Limits of the webhook: bytes of a body, bytes of all bodies together, seconds of a request, connections."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_BODY_BYTES = 8 << 20
"""An API server takes objects of 3 MiB; a review of an update holds two of them."""
MAX_ALL_BODIES_BYTES = 32 << 20
"""Bodies of all requests under way: the container has 256 MiB, and a parsed review takes several times its text."""
REQUEST_S = 10.0
"""For the TLS handshake's end to the last header, and from there to the last byte of the body. The API server waits 5 s."""
MAX_CONNECTIONS = 1024
"""Of all API servers together: each has at most 200 changing requests under way (``--max-mutating-requests-inflight``)."""
IDLE_S = 120
"""For the next request on a connection. An API server closes it after 90 s; what this side closes may just be in use."""


class BodyLimit:
    """ASGI middleware that receives the whole body before the application is called, or answers 408, 413 or 503."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_all_bytes: int = MAX_ALL_BODIES_BYTES,
        request_s: float = REQUEST_S,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_all_bytes = max_all_bytes
        self._request_s = request_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body()
        try:
            refused = await self._refusal(scope, receive, body)
            if refused is not None:
                await refused(scope, receive, send)
            elif not body.is_disconnected:
                await self._app(scope, body.replayed(receive), send)
        finally:
            self._held_bytes -= body.size_bytes

    async def _refusal(self, scope: Scope, receive: Receive, body: _Body) -> JSONResponse | None:
        """Fill the body and return ``None``, or the answer to a request that is beyond a limit."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._max_body_bytes:
            return self._too_large()
        try:
            async with asyncio.timeout(self._request_s):
                while chunk := await body.next_chunk(receive):
                    self._held_bytes += len(chunk)
                    if body.size_bytes > self._max_body_bytes:
                        return self._too_large()
                    if self._held_bytes > self._max_all_bytes:
                        return problem(503, "too many requests at once", "ask again")
        except TimeoutError:
            return problem(408, "request body incomplete", f"not received within {self._request_s:g} s")
        return None

    def _too_large(self) -> JSONResponse:
        return problem(413, "request body too large", f"must have at most {self._max_body_bytes} bytes")


class _Body:
    """The body of one request, as far as it was received."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._is_complete = False
        self.size_bytes = 0
        self.is_disconnected = False

    async def next_chunk(self, receive: Receive) -> bytes:
        """Return the next bytes, empty at the end."""
        while not self._is_complete and not self.is_disconnected:
            message = await receive()
            self.is_disconnected = message["type"] == "http.disconnect"
            self._is_complete = not message.get("more_body", False)
            chunk: bytes = message.get("body", b"")
            if chunk:
                self._chunks.append(chunk)
                self.size_bytes += len(chunk)
                return chunk
        return b""

    def replayed(self, receive: Receive) -> Receive:
        """Return a channel that delivers the body in one message, then what the client does."""
        given = False

        async def once() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": b"".join(self._chunks), "more_body": False}

        return once


def problem(status: int, title: str, detail: str) -> JSONResponse:
    """Return an error (RFC 9457) after which the connection is closed."""
    # What the client still sends of this request is not read: the connection cannot carry another one.
    headers = {"Connection": "close"}
    return JSONResponse({"title": title, "status": status, "detail": detail}, status, headers, "application/problem+json")


class HeaderDeadline(H11Protocol):
    """Closes a connection whose next request does not have all its headers in time.

    uvicorn has a deadline only for idle connections that have served a request and sent nothing since.
    """

    headers_s = REQUEST_S
    _headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Take what arrived; the deadline stands until a request's headers are complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        else:
            self._expect_headers()

    def on_response_complete(self) -> None:
        """Leave the idle connection to uvicorn's own deadline, unless a part of the next request is there already."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(self.headers_s, self._close_late)

    def _stop_waiting(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _close_late(self) -> None:
        # Not close(), which would wait for a peer that reads nothing.
        self.transport.abort()


def server_limits() -> dict[str, Any]:
    """Return the arguments of ``uvicorn.Config`` that bound connections, idle time and headers."""
    return {
        "http": HeaderDeadline,
        "limit_concurrency": MAX_CONNECTIONS,
        "timeout_keep_alive": IDLE_S,
        "h11_max_incomplete_event_size": 64 << 10,
    }
