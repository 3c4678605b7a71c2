"""How long a client may take: a server of ours around an application that is three lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import Request

from sidecar.api import guard
from sidecar.api.server import Server, listen
from sidecar.errors import ConfigurationError
from sidecar.serving import Connection

HOST = b"Host: 127.0.0.1\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(Connection, "request_s", 0.3)
    monkeypatch.setattr(Connection, "unread_s", 0.3)
    monkeypatch.setattr(guard, "BODY_S", 0.3)
    app = FastAPI()

    @app.get("/large")
    async def large() -> Response:
        return Response(bytes(64 << 20))

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    listening = listen("127.0.0.1", 0, setting="CKPT_API_PORT")
    server = Server(app, [listening])
    serving = asyncio.create_task(server.serve())
    yield listening.getsockname()[1]
    server.stop()
    await serving


def test_a_port_that_another_sidecar_listens_on_is_a_setting_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at the same time can both bind it; the second one fails when it listens."""

    def in_use(*_: object) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "listen", in_use)
    with pytest.raises(ConfigurationError, match=r"CKPT_API_PORT: cannot listen on 127\.0\.0\.1:0: Address already in use"):
        listen("127.0.0.1", 0, setting="CKPT_API_PORT")


async def connect(port: int, sends: bytes, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    writer.write(sends)
    return reader, writer


async def test_a_request_that_does_not_arrive_is_not_waited_for(port: int) -> None:
    reader, writer = await connect(port, b"GET /large HTTP/1.1\r\n" + HOST)
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()


async def test_nor_is_the_second_one_of_a_connection(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 5\r\n" + HOST + b"\r\n"
    reader, writer = await connect(port, head + b"first")
    await reader.readuntil(b"first")
    writer.write(b"GET /")
    await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_nor_its_body(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 10\r\n" + HOST + b"\r\n"
    reader, writer = await connect(port, head + b"{}")
    assert await asyncio.wait_for(reader.readline(), 20) == b"HTTP/1.1 408 Request Timeout\r\n"
    writer.close()


async def test_a_body_that_arrives_in_pieces_is_whole(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n" + HOST + b"\r\n"
    reader, writer = await connect(port, head + b"3\r\nabc\r\n")
    await writer.drain()
    writer.write(b"3\r\ndef\r\n0\r\n\r\n")
    answer = await reader.readuntil(b"abcdef")
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_an_answer_that_nobody_reads_does_not_keep_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, connection_lost = asyncio.Event(), Connection.connection_lost

    def lose(connection: Connection, error: Exception | None) -> None:
        connection_lost(connection, error)
        lost.set()

    monkeypatch.setattr(Connection, "connection_lost", lose)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        client.sendall(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
        await asyncio.wait_for(lost.wait(), 20)  # and nothing is read meanwhile
        received, loop = 0, asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while chunk := await loop.sock_recv(client, 1 << 20):
                received += len(chunk)
    assert received < 64 << 20
