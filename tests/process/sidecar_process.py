"""A real sidecar process on a real volume, and a trainer that is nothing but files."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tests.forks import Forked, Forks, forks
from tests.ports import free_port

PATIENCE_S = 60.0
SCAN_S = 0.6
"""Longer than from one look at a directory that is being written to the next."""
LITTLE_BYTES = 64 << 10
SIDECAR_MODULES = ("sidecar.daemon.daemon", "sidecar.api.server", "sidecar.store.s3.store", "sidecar.store.file.store")


def until(
    condition: Callable[[], Any], *, timeout_s: float = PATIENCE_S, every_s: float = 0.02, what: str | Callable[[], str] = ""
) -> Any:
    """Return the first true value of ``condition``. ``what`` it means, asked for when it did not come true."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        value = condition()
        if value:
            return value
        time.sleep(every_s)
    raise AssertionError(f"did not come true within {timeout_s} s: {what() if callable(what) else what or condition}")


def grow_until(file: BinaryIO, want: bytes, condition: Callable[[], Any], *, what: str | Callable[[], str]) -> None:
    """Append a little more of ``want`` again and again, until the condition holds.

    A file is sent while it grows only if it is seen growing, and a loaded machine looks seldom.
    """

    def grown() -> Any:
        if not condition():
            file.write(want[file.tell() :][:LITTLE_BYTES])
            return False
        return True

    until(grown, every_s=SCAN_S, what=what)


def write_checkpoint(volume: Path, name: str, files: Mapping[str, bytes], marker: Mapping[str, Any] | None = None) -> Path:
    """Do what a shell script does: write files, then the marker."""
    folder = volume / name
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / ".complete").write_text("" if marker is None else json.dumps(marker))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a checkpoint but its marker."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".complete"
    }


@functools.cache
def sidecar_forks() -> Forks:
    """Return the interpreter that all sidecars of this test process are forked from."""
    warm = forks(*SIDECAR_MODULES)
    atexit.register(warm.__exit__, None, None, None)
    return warm.__enter__()


class Sidecar:
    """``checkpoint-sidecar run`` as a child process."""

    def __init__(self, volume: Path, settings: Mapping[str, str], log: Path, *, within: Sequence[str] = ()) -> None:
        self.volume = volume
        self.port = free_port()
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "AWS_"))}
        environ |= {"CKPT_DIR": str(volume), "CKPT_API_PORT": str(self.port), "AWS_EC2_METADATA_DISABLED": "true"}
        environ |= {"JOB_NAME": "tests"}  # pods of one job replace each other at once
        self.environ = environ | dict(settings)
        self._log_path = log
        self.process = self._start(within)

    def _start(self, within: Sequence[str]) -> subprocess.Popen[bytes] | Forked:
        # As in a container of its own, its low priority counts among its own threads: the kernel groups by session.
        if not within:
            return sidecar_forks().start(["-m", "sidecar", "run"], environ=self.environ, log=self._log_path)
        command = [*within, sys.executable, "-m", "sidecar", "run"]
        with self._log_path.open("ab") as log:
            return subprocess.Popen(command, env=self.environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another command against this sidecar."""
        command = [sys.executable, "-m", "sidecar", *arguments]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60, check=False)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        found = []
        for line in self.log().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if name is None or event.get("event") == name:
                found.append(event)
        return found

    def call(self, method: str, path: str, body: Any = None, *, timeout_s: float = 30.0, token: str | None = None) -> Any:
        """Return the JSON answer of the API, also of an error, with its status under ``http_status``."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("content-type", "application/json")
        if method == "POST":
            request.add_header("x-checkpoint-sidecar", "tests")
        if token is not None:
            request.add_header("authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.loads(response.read()) | {"http_status": response.status}
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read()) | {"http_status": error.code}

    def up(self) -> Sidecar:
        """Wait until the API answers."""

        return self._until_ok("/healthz")

    def ready(self) -> Sidecar:
        """Wait until the store was reached."""
        return self._until_ok("/readyz")

    def _until_ok(self, path: str) -> Sidecar:
        def answers() -> bool:
            assert self.process.poll() is None, self.log()
            try:
                return bool(self.call("GET", path)["http_status"] == 200)
            except OSError:
                return False

        until(answers, what=lambda: f"{path} answers; log:\n{self.log()[-3000:]}")
        return self

    def status(self) -> Any:
        return self.call("GET", "/v1/status")

    def committed(self, name: str, *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait until a checkpoint is durable and return the event."""
        return until(
            lambda: next((e for e in self.events("checkpoint_committed") if e["checkpoint"] == name), None),
            timeout_s=timeout_s,
            what=lambda: f"{name} committed; log:\n{self.log()[-3000:]}",
        )

    def resume(self, checkpoint: str = "latest", **more: Any) -> Any:
        """Ask for a checkpoint and wait for the outcome."""
        asked = self.call("POST", "/v1/resume", {"checkpoint": checkpoint} | more)
        return self.answer(asked["id"])

    def answer(self, identifier: str, *, timeout_s: float = PATIENCE_S) -> Any:
        """Wait for the outcome of one request."""
        return until(lambda: self._outcome(identifier), timeout_s=timeout_s, what=lambda: f"resume; log:\n{self.log()[-3000:]}")

    def _outcome(self, identifier: str) -> Any:
        answer = self.call("GET", f"/v1/resume/{identifier}?wait_s=5")
        return answer if answer["state"] in ("ready", "none", "failed") else None

    def terminate(self, *, timeout_s: float = PATIENCE_S) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = PATIENCE_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()

    @property
    def report(self) -> Any:
        return json.loads((self.volume / ".ckpt/exit-report.json").read_text())


@contextmanager
def sidecar(volume: Path, settings: Mapping[str, str], *, within: Sequence[str] = ()) -> Iterator[Sidecar]:
    """Run a sidecar for the length of the context. ``within``: what goes before its command."""
    volume.mkdir(parents=True, exist_ok=True)
    running = Sidecar(volume, settings, volume.parent / f"{volume.name}-{free_port()}.log", within=within)
    try:
        yield running
    finally:
        running.close()
