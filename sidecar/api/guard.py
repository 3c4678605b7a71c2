"""Guard of all calls: refuses requests of web pages, limits body sizes and the number of concurrent calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sidecar.api.problems import ProblemDocument, answer
from sidecar.core.lifecycle.local_request import refusal

MOST_BODY_BYTES = 64 << 10
BODY_S = 10.0
"""Seconds for a client to send a body."""
MOST_UNDER_WAY = {"stream": 16, "wait": 64, "call": 64}
"""Maximum concurrent calls by kind. Separate limits keep streams and long polls from blocking the other calls."""
_UNCOUNTED = frozenset({"/healthz", "/readyz", "/metrics"})


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, any_host: bool = False) -> None:
        """Wrap an application. ``any_host``: accept any Host header, such as a pod's IP address."""
        self._app = app
        self._any_host = any_host
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
        try:
            await self._serve(scope, receive, send, headers)
        finally:
            self._under_way[kind or ""] -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        if "content-length" in headers or "transfer-encoding" in headers:
            try:
                async with asyncio.timeout(BODY_S):
                    body = await _body(receive, declared_bytes=headers.get("content-length"))
            except (_TooLarge, TimeoutError) as error:
                # The server discards the rest of the body until its time limit for a request.
                await answer(_BODY_PROBLEMS[type(error)])(scope, receive, send)
                return
            except _Gone:
                return
            receive = _once(body, receive)
        await self._app(scope, receive, send)


class _TooLarge(Exception):
    pass


class _Gone(Exception):
    """The client disconnected."""


_BODY_PROBLEMS: dict[type[Exception], ProblemDocument] = {
    _TooLarge: ProblemDocument(
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
        raise _TooLarge
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        body += message.get("body", b"")
        if len(body) > MOST_BODY_BYTES:
            raise _TooLarge
        if not message.get("more_body", False):
            return bytes(body)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that replays a body already read, then passes on further messages, such as a disconnect."""
    given = False

    async def give() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give


def _kind(scope: Scope) -> str | None:
    """Return the kind of a call for the limits; ``None``: it is answered at once and not limited."""
    path: str = scope["path"]
    if path in _UNCOUNTED:
        return None
    if path == "/v1/events":
        return "stream"
    return "wait" if path == "/v1/flush" or "wait_s" in Request(scope).query_params else "call"


def _headers(scope: Scope) -> dict[str, str]:
    found: dict[str, Any] = {}
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        key = name.decode("latin-1").lower()
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found
