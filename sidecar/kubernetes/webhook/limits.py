"""Limits of the webhook: bytes of a body, bytes of all bodies together, seconds of a request, connections."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.serving import Connection, Disconnected, body_of, most_connections, replayed

IDLE_S = 120
"""For the next request on a connection. An API server closes it after 90 s; what this side closes may just be in use."""


class BodyLimit:
    """ASGI middleware that receives the whole body before the application is called, or answers 408, 413 or 503."""

    max_body_bytes = 8 << 20
    """An API server takes objects of 3 MiB; a review of an update holds two of them."""
    max_all_bytes = 32 << 20
    """Bodies of all requests under way: the container has 256 MiB, and a parsed review takes several times its text."""
    body_s = 10.0
    """Seconds from the last header to the last byte of the body. The API server waits 5 s."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            refused = await self._refusal(scope, receive, body)
        except Disconnected:
            return
        else:
            await (refused(scope, receive, send) if refused else self._app(scope, replayed(bytes(body), receive), send))
        finally:
            self._held_bytes -= len(body)

    async def _refusal(self, scope: Scope, receive: Receive, body: bytearray) -> JSONResponse | None:
        """Fill the body and return ``None``, or the answer to a request that is beyond a limit."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self.max_body_bytes:
            return self._too_large()
        try:
            async with asyncio.timeout(self.body_s):
                async for chunk in body_of(receive):
                    body += chunk
                    self._held_bytes += len(chunk)
                    if len(body) > self.max_body_bytes:
                        return self._too_large()
                    if self._held_bytes > self.max_all_bytes:
                        return problem(503, "too many requests at once", "ask again")
        except TimeoutError:
            return problem(408, "request body incomplete", f"not received within {self.body_s:g} s")
        return None

    def _too_large(self) -> JSONResponse:
        return problem(413, "request body too large", f"must have at most {self.max_body_bytes} bytes")


def problem(status: int, title: str, detail: str) -> JSONResponse:
    """Return an error (RFC 9457) after which the connection is closed."""
    # What the client still sends of this request is not read: the connection cannot carry another one.
    headers = {"Connection": "close"}
    return JSONResponse({"title": title, "status": status, "detail": detail}, status, headers, "application/problem+json")


class WebhookConnection(Connection):
    """A connection of an API server."""

    most = most_connections(1024, share=2)
    """Of all API servers together: each has at most 200 changing requests under way (``--max-mutating-requests-inflight``)."""


def server_limits() -> dict[str, Any]:
    """Return the arguments of ``uvicorn.Config`` that bound connections, idle time and headers."""
    return {
        "http": WebhookConnection,
        "backlog": WebhookConnection.backlog(),
        "timeout_keep_alive": IDLE_S,
        "h11_max_incomplete_event_size": 64 << 10,
    }
