"""A sidecar that only answers, and one of whose answers fails in a chosen way."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

AWAY_S = 0.1
Answer = Callable[[str, Any], tuple[int, Any]]
"""Returns status and content for a call, such as ``GET /v1/status``, and its body."""

OTHER_CONTENT = {"list": b"[]", "empty": b"{}", "null": b"null", "html": b"<html>", "deep": b"[" * 100_000}
STATUSES = {"404": 404, "500": 500, "503": 503, "504": 504}
CUT = ("cut", "reset in the body", "silent in the body")
FAULTS = ("refused", "closed", "reset", "silent", "slow", *CUT, *(f"problem {cut}" for cut in CUT), *STATUSES, *OTHER_CONTENT)


def reply(status: int, content: bytes, *, length: int | None = None) -> bytes:
    length = len(content) if length is None else length
    return f"HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n".encode() + content


class FailingSidecar:
    """Its ``which``-th answer fails by ``fault``, one of ``FAULTS``."""

    def __init__(self, answer: Answer, which: int, fault: str) -> None:
        self.asked: list[str] = []
        self.failed: str | None = None
        """The call whose answer failed."""
        self._answer = answer
        self._which = which
        self._fault = fault
        self._silent: list[socket.socket] = []
        self._has_ended = False
        self._socket = self._listening(0)
        self.port: int = self._socket.getsockname()[1]
        if which == 1:
            self._go_away()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serve(self) -> None:
        while not self._has_ended:
            with suppress(TimeoutError):
                connection, _ = self._socket.accept()
                with suppress(OSError):
                    self._serve_one(connection)
                if connection not in self._silent:
                    connection.close()
                if len(self.asked) == self._which - 1:
                    self._go_away()

    def end(self) -> None:
        self._has_ended = True
        for connection in self._silent:
            connection.close()

    def close(self) -> None:
        self._socket.close()

    def _go_away(self) -> None:
        if self._fault == "refused":
            self._socket.close()
            time.sleep(AWAY_S)
            self._socket = self._listening(self.port)

    def _listening(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port))
        listener.settimeout(0.05)
        return listener

    def _serve_one(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        with connection.makefile("rb") as request:
            method, path, _ = request.readline().decode().split()
            headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(request.readline, b"\r\n"))
            body = request.read(int(headers.get("content-length", 0)))
        call = f"{method} {path.split('?')[0]}"
        self.asked.append(call)
        fails = len(self.asked) == self._which and self._fault != "refused"
        if len(self.asked) == self._which:
            self.failed = call
        status, content = self._answer(call, json.loads(body) if body else None)
        raw = json.dumps(content).encode()
        if fails:
            self._fail(connection, status, raw)
        else:
            connection.sendall(reply(status, raw))

    def _fail(self, connection: socket.socket, status: int, raw: bytes) -> None:
        fault = self._fault
        if fault.startswith("problem "):
            fault, status, raw = fault.removeprefix("problem "), 500, b'{"title": "Oops", "detail": "it is broken"}'
        if fault == "slow":
            time.sleep(0.05)
            connection.sendall(reply(status, raw))
        elif fault in CUT:
            connection.sendall(reply(status, raw[: len(raw) // 2], length=len(raw)))
        elif fault in STATUSES:
            connection.sendall(reply(STATUSES[fault], b'{"title": "Oops", "detail": "it is broken"}'))
        elif fault in OTHER_CONTENT:
            connection.sendall(reply(status, OTHER_CONTENT[fault]))
        if fault.startswith("silent"):
            self._silent.append(connection)
        if fault.startswith("reset"):
            time.sleep(0.02)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def failing_sidecar(answer: Answer, which: int, fault: str) -> Iterator[FailingSidecar]:
    """Serve on a local port."""
    sidecar = FailingSidecar(answer, which, fault)
    thread = threading.Thread(target=sidecar.serve, daemon=True)
    thread.start()
    try:
        yield sidecar
    finally:
        sidecar.end()
        thread.join()
        sidecar.close()
