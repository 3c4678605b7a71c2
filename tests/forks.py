"""Processes that are forked from a warm interpreter. Imports cost a sidecar one second of CPU, a trainer five."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    """Starts processes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
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
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(argv, futures["pid"], futures["code"])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            kind = "pid" if "pid" in said else "code"
            self._told[said["id"]][kind].set_result(said[kind])
        for futures in self._told.values():
            for future in futures.values():
                if not future.done():
                    future.set_exception(RuntimeError("tests/fork_server.py has ended"))


@contextmanager
def forks(*modules: str, environ: Mapping[str, str] | None = None) -> Iterator[Forks]:
    """Import modules in a process of its own, which forks."""
    command = [sys.executable, str(ROOT / "tests/fork_server.py"), *modules]
    with subprocess.Popen(
        command,
        env=dict(os.environ if environ is None else environ) | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        yield Forks(process)
        assert process.stdin is not None
        process.stdin.close()
