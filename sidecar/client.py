"""Talks to a running sidecar. Standard library only, because probes start it every few seconds."""

from __future__ import annotations

import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any

from trainer_hook.contract import API_SOCKET, DEFAULT_API_PORT, DEFAULT_DIR, TOKEN


class Unreachable(Exception):
    """No sidecar answers."""


class Refused(Exception):
    """The sidecar answered with a problem document."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(problem.get("detail") or problem.get("title") or f"HTTP {status}")
        self.status = status
        self.problem = problem


class Client:
    """One connection per call: over the unix socket on the volume where there is one, else the local port."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self._dir = Path(os.environ.get("CKPT_DIR") or DEFAULT_DIR)
        self._port = int(os.environ.get("CKPT_API_PORT") or DEFAULT_API_PORT)
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """Return the JSON answer.

        Raises:
            Unreachable: No sidecar answers.
            Refused: It answered with an error.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON answer. Raises as ``get``."""
        return self._call("POST", path, body or {})

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection = self._connect()
        headers = {"content-type": "application/json"} if body is not None else {}
        if method == "POST" and (token := self._token()):
            headers["authorization"] = f"Bearer {token}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read() or b"null")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise Refused(response.status, answer)
        return answer

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._timeout_s)
        path = str(self._dir / API_SOCKET)
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.settimeout(self._timeout_s)
        try:
            unix.connect(path)
        except OSError:
            unix.close()
        else:
            connection.sock = unix
        return connection

    def _token(self) -> str | None:
        try:
            return (self._dir / TOKEN).read_text().strip()
        except OSError:
            return None

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"no sidecar answers at 127.0.0.1:{self._port} or {self._dir / API_SOCKET} ({error}): "
            "start 'checkpoint-sidecar run', or set CKPT_DIR or CKPT_API_PORT to where it runs"
        )
