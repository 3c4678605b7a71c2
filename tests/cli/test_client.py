"""The client of the local API beside a server that does not keep to HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.cli.client import Client, Refused, Unreachable

OK = b"HTTP/1.1 200 OK\r\n\r\n"


@contextmanager
def server(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Answer one connection with these bytes. Yields the port and what was received."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)

        def serve() -> None:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(65536))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1], received
    thread.join(10)


@pytest.fixture
def _volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))


@pytest.mark.usefixtures("_volume")
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{",
        OK + b"[]",
        OK + b"5",
        OK + b"[" * 100_000,
        b"SSH-2.0 hello\r\n",
        b"HTTP/1.1 x",
    ],
)
def test_what_is_no_whole_answer_is_no_sidecar(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(answer) as (port, _):
        monkeypatch.setenv("CKPT_API_PORT", str(port))
        with pytest.raises(Unreachable, match="start 'checkpoint-sidecar run'"):
            Client(timeout_s=5).get("/healthz")


@pytest.mark.usefixtures("_volume")
def test_a_problem_document_is_a_refusal_with_its_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(b'HTTP/1.1 409 Conflict\r\nA: b\r\n\r\n{"detail": "not now"}') as (port, received):
        monkeypatch.setenv("CKPT_API_PORT", str(port))
        with pytest.raises(Refused, match="not now") as refused:
            Client(timeout_s=5).post("/v1/save", {"stop": True})
    assert refused.value.status == 409
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/save HTTP/1.1\r\n")
    assert b"content-length: 14" in head
    assert body == b'{"stop": true}'


@pytest.mark.usefixtures("_volume")
@pytest.mark.parametrize("path", ["/a b", "/a\r\nx: y", "/ä"])
def test_a_path_cannot_carry_another_header(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(b"HTTP/1.1 200 OK\r\n\r\nnull") as (port, received):
        monkeypatch.setenv("CKPT_API_PORT", str(port))
        with pytest.raises(Unreachable):
            Client(timeout_s=5).get(path)
    assert received in ([], [b""])
