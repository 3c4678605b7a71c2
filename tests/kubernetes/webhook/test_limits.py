"""What a client that means harm, or is merely broken, can make the webhook hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.webhook.app import create_app
from sidecar.kubernetes.webhook.limits import BodyLimit, WebhookConnection, server_limits
from tests.kubernetes.webhook.test_review import admission, pod


@asynccontextmanager
async def serving(app: object = None, **limits: object) -> AsyncIterator[int]:
    """Serve on a free port without TLS; yields the port."""
    app = app or create_app(Options(store="s3://bucket/x"))
    config = uvicorn.Config(app, port=0, log_config=None, **server_limits() | limits)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def answer_to(port: int, *pieces: bytes) -> bytes:
    """Send pieces and return everything that comes back until the server closes or nothing more comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


def limited(**limits: float) -> BodyLimit:
    app = create_app(Options())
    vars(app).update(limits)
    return app


def head(*lines: str, method: str = "POST", path: str = "/mutate") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", ""]).encode()


@pytest.mark.asyncio
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent() -> None:
    async with serving() as port:
        for path in ("/mutate", "/healthz", "/nothing"):
            assert b" 413 " in await answer_to(port, head(f"Content-Length: {BodyLimit.max_body_bytes + 1}", path=path))


@pytest.mark.asyncio
async def test_a_body_in_chunks_is_read_up_to_the_limit_and_no_further() -> None:
    chunk, sent = b"10000\r\n" + b" " * 0x10000 + b"\r\n", 0
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        writer.write(head("Transfer-Encoding: chunked"))
        # The server may close while more is on its way: the kernel then drops the answer.
        with contextlib.suppress(ConnectionError):
            while not answer.done() and sent < 10 * BodyLimit.max_body_bytes:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0)
                sent += 0x10000
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            assert b" 413 " in await answer
        assert sent < 4 * BodyLimit.max_body_bytes
        writer.close()


@pytest.mark.asyncio
async def test_a_body_in_chunks_that_is_too_large_is_told_so() -> None:
    async with serving(limited(max_body_bytes=100)) as port:
        body = b"65\r\n" + b" " * 0x65 + b"\r\n0\r\n\r\n"
        answer = await answer_to(port, head("Transfer-Encoding: chunked"), body)
        assert b" 413 " in answer
        assert b"connection: close" in answer.lower()


@pytest.mark.asyncio
async def test_a_large_review_within_the_limit_is_answered() -> None:
    found = pod(annotations={"note": "x" * (3 << 20)})
    body = json.dumps(admission(found)).encode()
    async with serving() as port:
        assert b" 200 " in await answer_to(port, head(f"Content-Length: {len(body)}"), body)


@pytest.mark.asyncio
async def test_a_body_that_never_ends_is_given_up() -> None:
    async with serving(limited(body_s=0.2)) as port:
        assert b" 408 " in await answer_to(port, head("Content-Length: 100"), b"{")


@pytest.mark.asyncio
async def test_many_bodies_together_are_bounded_and_a_place_is_free_again_afterwards() -> None:
    app = limited(max_body_bytes=1000, max_all_bytes=1500, body_s=30)
    async with serving(app) as port:
        _, first = await asyncio.open_connection("127.0.0.1", port)
        first.write(head("Content-Length: 1000") + b" " * 999)
        await first.drain()
        while app._held_bytes < 999:
            await asyncio.sleep(0.01)
        assert b" 503 " in await answer_to(port, head("Content-Length: 1000"), b" " * 1000)
        first.close()
        while app._held_bytes:
            await asyncio.sleep(0.01)
        assert b" 400 " in await answer_to(port, head("Content-Length: 1000"), b" " * 1000)
        assert app._held_bytes == 0


class Hasty(WebhookConnection):
    request_s = 0.2


@pytest.mark.asyncio
@pytest.mark.parametrize("sent", [b"", b"POST /mutate HTTP/1.1\r\nHost:"])
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    async with serving(http=Hasty) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.close()


@pytest.mark.asyncio
async def test_the_next_request_of_a_connection_has_the_same_deadline() -> None:
    async with serving(http=Hasty) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(head(method="GET", path="/healthz"))
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in answer
            await reader.readexactly(len(b'{"status":"ok"}'))
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await asyncio.wait_for(reader.readexactly(1), 20)
        writer.close()


@pytest.mark.asyncio
async def test_an_idle_connection_is_not_closed_before_the_api_servers_client_would() -> None:
    """uvicorn's own limit is 5 s: a review that is just being sent then is lost."""
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(admission(pod())).encode()
        for wait_s in (0, 6):
            await asyncio.sleep(wait_s)
            writer.write(head(f"Content-Length: {len(body)}") + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in answer
            length = next(line for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await reader.readexactly(int(length.split()[1]))
        writer.close()
