"""Training processes that are forked from one which has imported their libraries: TRL alone costs seven seconds of CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.hook.job import ROOT, SCRIPTS, plain_environ
from trainer_hook.activation.launcher import environment_for

MODULES = ("torch", "accelerate", "datasets", "tokenizers", "transformers.modeling_utils")


class Forked:
    """A process of which ``Forks`` tells the end; used as a ``subprocess.Popen``."""

    def __init__(self, command: list[str], pid: int, code: Future[int]) -> None:
        self._command = command
        self._code = code
        self.pid = pid

    def poll(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._code.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self._command, timeout or 0) from None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Starts one process at a time."""

    def __init__(self, process: subprocess.Popen[str], pool: ThreadPoolExecutor) -> None:
        self._process = process
        self._pool = pool
        assert self.line() == "ready"

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{SCRIPTS / 'forks.py'} ended with {self._process.wait()}"
        return line.strip()

    def start(self, command: list[str], folder: Path, environ: Mapping[str, str], log_path: Path) -> Forked:
        """Start a Python script, also behind ``python -m trainer_hook run --``. As ``tests.hook.job.popen``."""
        if command[1:5] == ["-m", "trainer_hook", "run", "--"]:
            command, environ = command[5:], environment_for(environ)
        log_path.touch()
        told = {"command": command, "folder": str(folder), "environ": dict(environ), "log": str(log_path)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return Forked(command, int(self.line()), self._pool.submit(lambda: int(self.line())))


@contextmanager
def forks(*modules: str) -> Iterator[Forks]:
    """Import modules in a process of its own, which forks."""
    command = [sys.executable, str(SCRIPTS / "forks.py"), *MODULES, *modules]
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)}
    with (
        subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        yield Forks(process, pool)
        assert process.stdin is not None
        process.stdin.close()
