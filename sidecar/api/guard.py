"""Guard of all calls: refuses requests of web pages, limits body sizes and the number of concurrent calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sidecar.api.problems import ProblemDocument, answer
from sidecar.catalog.durations import Durations
from sidecar.core.lifecycle.local_request import refusal
from sidecar.serving import Disconnected, body_of, replayed

MOST_BODY_BYTES = 64 << 10
BODY_S = 10.0
"""Seconds for a client to send a body."""
MOST_UNDER_WAY = {"viewer": 8, "stream": 16, "wait": 64, "call": 64}
"""Maximum concurrent calls by kind. Separate limits keep streams and long polls from blocking the other calls."""
_STREAMS = {"/v1/events": "stream", "/v1/live": "viewer"}
_UNCOUNTED = frozenset({"/healthz", "/readyz", "/metrics"})


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, any_host: bool = False, durations: Durations | None = None) -> None:
        """Wrap an application.

        Args:
            app: The application.
            any_host: Accept any Host header, such as a pod's IP address.
            durations: Counts the durations of calls; ``None``: they are not counted.
        """
        self._app = app
        self._any_host = any_host
        self._durations = durations
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert scope["type"] == "http", "neither lifespan nor websockets are served"
        headers = _headers(scope)
        is_unix_socket = scope["server"] is None or scope["server"][1] is None
        refused = refusal(scope["method"], headers, any_host=self._any_host or is_unix_socket)
        problem = None if refused is None else ProblemDocument(status=refused[0], title=refused[1], detail=refused[2])
        kind = _kind(scope)
        if problem is None and kind is not None and self._under_way[kind] >= MOST_UNDER_WAY[kind]:
            detail = f"{MOST_UNDER_WAY[kind]} of this kind are under way: end some of them, or ask again in a second"
            problem = ProblemDocument(status=503, title="Too many calls at once", detail=detail)
        if problem is not None:
            await answer(problem)(scope, receive, send)
            return
        self._under_way[kind or ""] += 1
        began_s = time.monotonic()
        try:
            await self._serve(scope, receive, send, headers)
        finally:
            self._under_way[kind or ""] -= 1
        route = scope.get("route")  # set by FastAPI
        if self._durations is not None and kind in (None, "call") and route is not None:
            self._durations.answered(f"{scope['method']} {route.path}", time.monotonic() - began_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        if "content-length" in headers or "transfer-encoding" in headers:
            try:
                async with asyncio.timeout(BODY_S):
                    body = await _body(receive, declared_bytes=headers.get("content-length"))
            except (_BodyTooLarge, TimeoutError) as error:
                # The server discards the rest of the body until its time limit for a request.
                await answer(_BODY_PROBLEMS[type(error)])(scope, receive, send)
                return
            except Disconnected:
                return
            receive = replayed(body, receive)
        await self._app(scope, receive, send)


class _BodyTooLarge(Exception):
    pass


_BODY_PROBLEMS: dict[type[Exception], ProblemDocument] = {
    _BodyTooLarge: ProblemDocument(
        status=413,
        title="Body too large",
        detail=f"a body may have {MOST_BODY_BYTES} bytes; /openapi.json says what calls take",
    ),
    TimeoutError: ProblemDocument(
        status=408, title="Body not received", detail=f"the body did not arrive within {BODY_S:.0f} s: send it at once"
    ),
}


async def _body(receive: Receive, *, declared_bytes: str | None) -> bytes:
    if declared_bytes is not None and int(declared_bytes) > MOST_BODY_BYTES:  # digits only, at most 20: h11 looks
        raise _BodyTooLarge
    body = bytearray()
    async for chunk in body_of(receive):
        body += chunk
        if len(body) > MOST_BODY_BYTES:
            raise _BodyTooLarge
    return bytes(body)


def _kind(scope: Scope) -> str | None:
    """Return the kind of a call for the limits; ``None``: it is answered at once and not limited."""
    path: str = scope["path"]
    if path in _UNCOUNTED:
        return None
    if path in _STREAMS:
        return _STREAMS[path]
    return "wait" if path == "/v1/flush" or "wait_s" in Request(scope).query_params else "call"


def _headers(scope: Scope) -> dict[str, str]:
    found: dict[str, Any] = {}
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        key = name.decode("latin-1").lower()
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found
