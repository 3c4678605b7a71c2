"""A Prometheus that scrapes sidecars and answers queries."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.ports import free_port

SCRAPE_S = 1
CONFIGURATION = """
global: {{scrape_interval: {scrape_s}s, scrape_timeout: {scrape_s}s}}
scrape_configs:
  - job_name: checkpoint-sidecar
    file_sd_configs: [{{files: [targets.json], refresh_interval: 1s}}]
"""


def program() -> str | None:
    """Return the path of ``prometheus`` (Debian's package of that name); ``None``: it is not installed."""
    return shutil.which("prometheus")


def version() -> str:
    """Return the version of Prometheus.

    Raises:
        FileNotFoundError: It is not installed.
    """
    said = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version (\d[\d.]*)", said.stdout + said.stderr)
    return found[1] if found else "unknown"


class Prometheus:
    """A server of its own, with its data in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._targets: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[Prometheus]:
        """Start it, wait until it answers, and end it after the context.

        Raises:
            RuntimeError: It ended at its start, or did not answer within 30 s.
        """
        self._folder.mkdir(parents=True)
        self._write_targets()
        (self._folder / "prometheus.yml").write_text(CONFIGURATION.format(scrape_s=SCRAPE_S))
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
        command.append(f"--web.listen-address=127.0.0.1:{self._port}")
        with (self._folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._until_ready(server)
            yield self
        finally:
            server.terminate()
            server.wait()

    def add(self, namespace: str, pod: str, port: int) -> None:
        """Scrape a sidecar, with the labels that the operator gives the endpoint of a PodMonitor."""
        labels = {"namespace": namespace, "pod": pod, "container": "checkpoint-sidecar", "endpoint": "ckpt-metrics"}
        self._targets[pod] = {"targets": [f"127.0.0.1:{port}"], "labels": labels}
        self._write_targets()

    def remove(self, pod: str) -> None:
        """Scrape a sidecar no longer."""
        del self._targets[pod]
        self._write_targets()

    def range(self, expression: str, *, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """Return the series of an expression. An instant without a number is NaN.

        Raises:
            ValueError: Prometheus refused the expression.
        """
        found = self._get("query_range", query=expression, start=start_s, end=end_s, step=step_s)
        count = round((end_s - start_s) / step_s) + 1
        series = []
        for one in found["result"]:
            values = [math.nan] * count
            for at_s, value in one["values"]:
                values[round((at_s - start_s) / step_s)] = float(value)
            series.append((one["metric"], values))
        return series

    def label_values(self, label: str, selector: str) -> list[str]:
        """Return the values of a label among the series of a selector."""
        found: list[str] = self._get(f"label/{label}/values", **{"match[]": selector})
        return found

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def _write_targets(self) -> None:
        written = self._folder / "targets.tmp"
        written.write_text(json.dumps(list(self._targets.values())))
        written.rename(self._folder / "targets.json")

    def _until_ready(self, server: subprocess.Popen[bytes]) -> None:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=1):
                return
            if server.poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"Prometheus did not start: {(self._folder / 'log').read_text()[-2000:]}")


Series = tuple[Mapping[str, str], list[float]]
"""Labels, and a value for each instant of a range."""
