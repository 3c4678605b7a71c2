"""Processes that are forked from a warm interpreter. Imports cost a sidecar one second of CPU, a trainer five."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests import servers

ROOT = Path(__file__).resolve().parents[1]


class Forked:
    """A process of which ``Forks`` tells the end; used as a ``subprocess.Popen``."""

    def __init__(self, argv: Sequence[str], pid: Future[int], code: Future[int]) -> None:
        self.args = list(argv)
        self._code = code
        self.pid = pid.result()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._code.result(timeout)
        except NotYet:
            raise subprocess.TimeoutExpired(self.args, timeout or 0) from None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its code is on the way
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Starts processes. Any number of test processes share the interpreter that they are forked from."""

    def __init__(self, connection: socket.socket) -> None:
        self.path = str(connection.getpeername())
        """Socket of the interpreter."""
        self._connection = connection
        self._ids = itertools.count()
        self._told: dict[int, dict[str, Future[int]]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, argv: Sequence[str], *, environ: Mapping[str, str], log: Path, folder: Path | None = None) -> Forked:
        """Run ``python ARGV`` in a session of its own. Its output is appended to ``log``."""
        id, futures = next(self._ids), {"pid": Future[int](), "code": Future[int]()}
        self._told[id] = futures
        log.touch()
        told = {"id": id, "argv": list(argv), "environ": dict(environ), "log": str(log), "folder": str(folder or Path.cwd())}
        self._connection.sendall(json.dumps(told).encode() + b"\n")
        return Forked(argv, futures["pid"], futures["code"])

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        with self._connection.makefile("rb") as answers:
            for line in answers:
                said: dict[str, Any] = json.loads(line)
                kind = "pid" if "pid" in said else "code"
                self._told[said["id"]][kind].set_result(said[kind])
        for futures in self._told.values():
            for future in futures.values():
                if not future.done():
                    future.set_exception(RuntimeError("tests/fork_server.py has ended"))


@contextmanager
def forks(*modules: str, environ: Mapping[str, str] | None = None) -> Iterator[Forks]:
    """Import modules in a process of its own, which forks. The processes of a test run share it."""
    environ = dict(os.environ if environ is None else environ) | {"PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        shared = os.environ.get(servers.SHARED) or stack.enter_context(tempfile.TemporaryDirectory(prefix="forks-"))
        id = hashlib.sha256("\n".join(modules).encode()).hexdigest()[:16]
        forks = Forks(_connected(Path(shared) / f"forks-{id}", modules, environ))
        stack.callback(forks.close)
        yield forks


def _connected(path: Path, modules: Sequence[str], environ: Mapping[str, str]) -> socket.socket:
    """Connect to the server of these modules. Start it where none listens."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:  # none was started, or it has ended with its last connection
            path.unlink(missing_ok=True)
            _start(path, modules, environ)
            connection.connect(str(path))
        return connection


def _start(path: Path, modules: Sequence[str], environ: Mapping[str, str]) -> None:
    command = [sys.executable, str(ROOT / "tests/fork_server.py"), str(path), *modules]
    subprocess.run(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, check=True
    )
