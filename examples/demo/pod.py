"""A pod without Kubernetes: a trainer and a sidecar process on one folder, ended in the order in which kubelet ends them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from examples.demo.timeline import Timeline, sentence


def free_port() -> int:
    """Return a local port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A child process whose output is read line by line."""

    def __init__(self, arguments: list[str], environ: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            arguments, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._on_line = on_line
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip("\n"))
                self._on_line(self.lines[-1])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs; it is killed.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._reader.join(5)
        return code

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class SidecarLog:
    """What the sidecar of one pod logged, told on the timeline; and what the hook beside it said."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._changed = threading.Condition()
        self.events: list[dict[str, Any]] = []

    def on_sidecar(self, line: str) -> None:
        """Take a line of the sidecar's output."""
        try:
            event = json.loads(line)
        except ValueError:
            self._timeline.say("sidecar", line)
            return
        said = sentence(event)
        if said:
            self._timeline.say("sidecar", said)
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def on_trainer(self, line: str) -> None:
        """Take a line of the trainer's output."""
        if line.startswith("[checkpoint]"):
            self._timeline.say("hook", line.removeprefix("[checkpoint]").strip())

    def find(self, name: str, **fields: Any) -> dict[str, Any] | None:
        """Return the first event of a name with these fields."""
        return next((e for e in self.events if e.get("event") == name and all(e.get(k) == v for k, v in fields.items())), None)

    def wait_for(self, name: str, *, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Return the first event of a name with these fields, waiting for it.

        Raises:
            TimeoutError: It did not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.find(name, **fields) is not None, timeout_s)
        event = self.find(name, **fields)
        if event is None:
            raise TimeoutError(f"the sidecar did not report {name} {fields or ''} within {timeout_s} s")
        return event


class Pod(SidecarLog):
    """One pod: an empty volume, a sidecar, a trainer."""

    def __init__(self, timeline: Timeline, volume: Path, settings: Mapping[str, str]) -> None:
        volume.mkdir(parents=True)
        super().__init__(timeline)
        self.volume = volume
        self._environ = os.environ | dict(settings)
        self._environ |= {"CKPT_DIR": str(volume), "CKPT_API_PORT": str(free_port()), "PYTHONUNBUFFERED": "1"}
        self.sidecar = Process([sys.executable, "-m", "sidecar", "run"], self._environ, self.on_sidecar)
        self.trainer: Process | None = None

    def train(self, command: list[str]) -> Process:
        """Start the training script under the hook."""
        self.trainer = Process([sys.executable, "-m", "trainer_hook", "run", "--", *command], self._environ, self.on_trainer)
        return self.trainer

    def end_sidecar(self, *, timeout_s: float) -> int:
        """Send SIGTERM, as kubelet does once the trainer has ended, and return the exit code."""
        self.sidecar.signal(signal.SIGTERM)
        return self.sidecar.wait(timeout_s)

    def kill(self) -> None:
        """End both at once: for when the demo itself failed."""
        for process in (self.trainer, self.sidecar):
            if process is not None:
                process.kill()


def at_s(event: dict[str, Any]) -> float:
    """Return when an event was logged, in epoch seconds."""
    return datetime.fromisoformat(str(event["timestamp"]).replace("Z", "+00:00")).timestamp()
