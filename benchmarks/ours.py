"""This project's client: the real sidecar process on a volume; files stand for the trainer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.cost import LONGEST_S, Cost, Failed
from benchmarks.stores import BUCKET, StoreServer, free_port

CHECKPOINT = "checkpoint-1"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def upload(store: StoreServer, prefix: str, files: Path, scratch: Path, **settings: str) -> Cost:
    """Let a sidecar make a checkpoint durable: from the marker to the commit."""
    with running(store, prefix, scratch, CKPT_RESUME="off", **settings) as sidecar:
        return sidecar.publish(files, CHECKPOINT)


def download(store: StoreServer, prefix: str, scratch: Path, check: Callable[[Path], None]) -> Cost:
    """Let a sidecar bring the newest checkpoint to an empty volume: from the request to ready; ``check`` gets its folder."""
    with running(store, prefix, scratch, CKPT_RESUME="on-demand") as sidecar:
        cost = sidecar.resume()
        check(sidecar.volume / CHECKPOINT)
        return cost


@contextlib.contextmanager
def running(store: StoreServer, prefix: str, scratch: Path, **settings: str) -> Iterator[Sidecar]:
    """Run a sidecar on an empty volume in ``scratch`` until the context ends."""
    sidecar = Sidecar(store, prefix, scratch, settings)
    try:
        sidecar.wait_ready()
        yield sidecar
    finally:
        sidecar.process.kill()
        sidecar.process.wait()
        shutil.rmtree(sidecar.volume)


class Sidecar:
    """``checkpoint-sidecar run`` as a child process."""

    def __init__(self, store: StoreServer, prefix: str, scratch: Path, settings: dict[str, str]) -> None:
        self.volume = scratch / "volume"
        self.volume.mkdir()
        self._port = free_port()
        self._log_path = scratch / "sidecar.log"
        environ = store.client_environ() | {
            "CKPT_DIR": str(self.volume),
            "CKPT_STORE": f"s3://{BUCKET}/{prefix}",
            "CKPT_API_PORT": str(self._port),
            "CKPT_VERIFY": "auto" if store.keeps else "off",  # what was discarded cannot be verified
        }
        if store.certificates:
            environ["CKPT_CA_BUNDLE"] = str(store.certificates)
        with self._log_path.open("wb") as log:
            command = [sys.executable, "-m", "sidecar", "run"]
            self.process = subprocess.Popen(command, env=environ | settings, stdout=log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Wait until the store was reached."""

        def is_ready() -> bool:
            try:
                self._call("GET", "/readyz")
            except OSError:
                return False
            return True

        self._until(is_ready)

    def publish(self, files: Path, name: str) -> Cost:
        """Publish a checkpoint as the hook does, wait until it is durable, and return the cost."""
        folder = self.volume / name
        shutil.copytree(files, folder, copy_function=os.link)  # the files are there before the clock starts
        idle_rss_mib, cpu_s, began_s = self._memory_mib("VmRSS"), self.cpu_s(), time.time()
        marker = folder / ".marker"
        marker.write_text("{}")
        marker.rename(folder / ".complete")
        committed: dict[str, Any] = self._until(lambda: self._event("checkpoint_committed", name))
        wall_s = datetime.fromisoformat(committed["timestamp"]).timestamp() - began_s
        return Cost(self.cpu_s() - cpu_s, self._memory_mib("VmHWM"), wall_s, idle_rss_mib)

    def hand_over(self, files: Path, name: str, *, reason: str = "periodic") -> None:
        """Publish an existing checkpoint without waiting."""
        folder = self.volume / name
        shutil.copytree(files, folder, copy_function=os.link)
        self.mark(name, reason=reason)

    def mark(self, name: str, *, reason: str) -> None:
        """Write the marker of a checkpoint."""
        marker = self.volume / name / ".marker"
        marker.write_text(json.dumps({"reason": reason}))
        marker.rename(self.volume / name / ".complete")

    def drain(self) -> None:
        """Give notice, as preStop does."""
        self._call("POST", "/v1/drain?source=prestop")

    def committed_at_s(self, name: str) -> float:
        """Wait until a checkpoint is durable and return when it was, in epoch seconds."""
        committed: dict[str, Any] = self._until(lambda: self._event("checkpoint_committed", name))
        return datetime.fromisoformat(committed["timestamp"]).timestamp()

    def sent_bytes(self) -> int:
        """Return the bytes that have arrived in the store."""
        return int(self._call("GET", "/v1/status")["sent_bytes"])

    def report(self) -> Any:
        """End it by SIGTERM and return its exit report."""
        self.process.terminate()
        self.process.wait(LONGEST_S)
        return json.loads((self.volume / ".ckpt/exit-report.json").read_text())

    def resume(self) -> Cost:
        """Request the newest checkpoint, wait until it is on the volume, and return the cost."""
        idle_rss_mib, cpu_s, began_s = self._memory_mib("VmRSS"), self.cpu_s(), time.monotonic()
        self._call("POST", "/v1/resume", {"checkpoint": "latest"})
        while (answer := self._call("GET", "/v1/resume?wait_s=5"))["state"] not in ("ready", "none", "failed"):
            if time.monotonic() > began_s + LONGEST_S:
                break
        if answer["state"] != "ready":
            raise Failed(f"resume: {answer}")
        return Cost(self.cpu_s() - cpu_s, self._memory_mib("VmHWM"), time.monotonic() - began_s, idle_rss_mib)

    def _until(self, condition: Callable[[], Any]) -> Any:
        deadline_s = time.monotonic() + LONGEST_S
        while not (value := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise Failed(f"the sidecar failed: {self._log_path.read_text()[-500:]}")
            time.sleep(0.01)
        return value

    def _event(self, name: str, checkpoint: str) -> dict[str, Any] | None:
        for line in self._log_path.read_text().splitlines(keepends=True):
            if f'"{name}"' in line and line.endswith("\n"):
                event: dict[str, Any] = json.loads(line)
                if event["event"] == name and event["checkpoint"] == checkpoint:
                    return event
        return None

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", method=method)
        if method == "POST":
            request.data = json.dumps(body or {}).encode()
            request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())

    def cpu_s(self) -> float:
        """CPU time of all threads, user and system. Source: proc_pid_stat(5), fields 14 and 15, counted behind the name."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def _memory_mib(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) / 1024
