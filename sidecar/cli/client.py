"""Talks to a running sidecar. Probes start it every few seconds: it does without ``http.client``, which loads TLS and email."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from sidecar.errors import ConfigurationError
from sidecar.volume.opener import Folder
from sidecar.volume.resolve import open_stepwise
from sidecar.volume.sockets import connect_unix
from trainer_hook.contract import API_SOCKET, DEFAULT_API_PORT, DEFAULT_DIR, TOKEN, port_number


class Unreachable(Exception):
    """No sidecar answers."""


class _Answer(dict[str, Any]):
    """A JSON object of an answer. A field that is not there is no mistake of the command: another program answers."""

    def __missing__(self, field: str) -> Any:
        raise Unreachable(_unlike(f"it has no {field!r}"))


class Refused(Exception):
    """The sidecar answered with a problem document."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(problem.get("detail") or problem.get("title") or f"HTTP {status}")
        self.status = status
        self.problem = problem


class Client:
    """One connection per call: over the unix socket on the volume where there is one, else the local port."""

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        """Read from the environment where the sidecar is.

        Raises:
            ConfigurationError: ``CKPT_API_PORT`` is no port.
        """
        # By steps: probes start this every few seconds, and loading what openat2 needs takes longer than they do.
        self._dir = Folder(Path(os.environ.get("CKPT_DIR") or DEFAULT_DIR), resolve=open_stepwise)
        self._port = _port(os.environ.get("CKPT_API_PORT", "").strip() or str(DEFAULT_API_PORT))
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

    @property
    def folder(self) -> Folder:
        """The shared volume."""
        return self._dir

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"host": f"127.0.0.1:{self._port}", "connection": "close"}
        payload = b""
        if body is not None:
            payload = json.dumps(body).encode()
            headers |= {"content-type": "application/json", "content-length": str(len(payload)), "x-checkpoint-sidecar": "cli"}
        if method == "POST" and (token := self._token()):
            headers["authorization"] = f"Bearer {token}"
        try:
            with self._connect() as connection:
                connection.sendall(_head(method, path, headers) + payload)
                status, answer = _received(connection)
            if status >= 400 and not isinstance(answer.get("detail"), str):
                raise ValueError(f"the answer is not the sidecar's: HTTP {status} without a reason")
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from None
        if status >= 400:
            raise Refused(status, answer)
        return answer

    def _connect(self) -> socket.socket:
        with suppress(OSError):
            return connect_unix(self._dir / API_SOCKET, timeout_s=self._timeout_s)
        return socket.create_connection(("127.0.0.1", self._port), timeout=self._timeout_s)

    def _token(self) -> str | None:
        # The trainer can write here: through a link, the secret of another container would be sent to the API's port.
        try:
            return (self._dir / TOKEN).read(max_bytes=1024)[0].decode("ascii", errors="ignore").strip() or None
        except OSError:
            return None

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"no sidecar answers at 127.0.0.1:{self._port} or {self._dir / API_SOCKET} ({error}): "
            "start 'checkpoint-sidecar run', or set CKPT_DIR or CKPT_API_PORT to where it runs"
        )


def _unlike(why: str) -> str:
    return (
        f"no sidecar of this version answers: the answer is another program's, {why}: "
        "set CKPT_DIR or CKPT_API_PORT to where the sidecar runs"
    )


def _head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if any(character <= " " for character in path) or any("\r" in line or "\n" in line for line in lines):
        raise ValueError("the request has control characters or spaces")
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("ascii")


def _received(connection: socket.socket) -> tuple[int, Any]:
    """Return status and JSON body of an answer that ends with its connection, as this API's answers do.

    Raises:
        ValueError: It is no HTTP answer with a JSON body.
        OSError: The connection broke, or nothing came in time.
    """
    with connection.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    version, status, *_ = [*head[:64].split(None, 2), b"", b""]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise ValueError("the connection ended without an HTTP answer")
    try:
        answer = json.loads(body, object_pairs_hook=_Answer)
    except (ValueError, RecursionError):
        raise ValueError("the answer is not the sidecar's: it is no JSON") from None
    if not isinstance(answer, dict):
        raise ValueError("the answer is not the sidecar's: it is no JSON object")
    return int(status), answer


def _port(text: str) -> int:
    # The port of a sidecar with port 0 is unknown beforehand; its socket on the volume is not.
    try:
        return port_number(text)
    except ValueError:
        raise ConfigurationError(f"CKPT_API_PORT={text!r}: must be the port of the running sidecar, from 1 to 65535") from None
