"""Cost of a start of the sidecar until ``/readyz``, beside the imports of its libraries.

Rounds are interleaved, medians are printed. A first round, which writes the bytecode, is discarded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.ours import running
from benchmarks.results import write
from benchmarks.stores import StoreServer, opened

IMPORTS = {
    "nothing": "pass",
    "pydantic": "import pydantic",
    "awscrt": "import awscrt.checksums",
    "boto3": "import boto3",
    "fastapi, uvicorn": "import fastapi, uvicorn",
    "all of these": "import pydantic, awscrt.checksums, boto3, fastapi, uvicorn",
}
FILE, S3 = "sidecar, file://", "sidecar, S3"
_REPORT = """
import json, pathlib, time
cpu_s = time.process_time()
told = {p: pathlib.Path("/proc/self", p).read_text() for p in ("status", "smaps_rollup")}
print(json.dumps([cpu_s, told["status"], told["smaps_rollup"]]))
"""


@dataclass(frozen=True)
class Start:
    """Cost of one process. CPU time is user and system, of all threads."""

    cpu_s: float
    wall_s: float
    """Wall time until the process is ready, or has ended."""
    rss_mib: float
    pss_mib: float
    """As ``rss_mib``, but shared pages are divided among their processes."""


def of_imports(code: str) -> Start:
    """Run an interpreter that only imports."""
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", code + _REPORT], env=_environ(), capture_output=True, text=True, check=True)
    wall_s = time.monotonic() - began_s
    cpu_s, status, rollup = json.loads(ended.stdout)
    return Start(cpu_s, wall_s, _kib(status, "VmRSS") / 1024, _kib(rollup, "Pss") / 1024)


def of_sidecar(store: StoreServer, **settings: str) -> Start:
    """Run a sidecar on an empty volume until it has reached its store."""
    with tempfile.TemporaryDirectory() as scratch:
        began_s = time.monotonic()
        with running(store, "start", Path(scratch), **settings) as sidecar:
            wall_s = time.monotonic() - began_s
            cpu_s, process = sidecar.cpu_s(), Path("/proc", str(sidecar.process.pid))
            status, rollup = (process / "status").read_text(), (process / "smaps_rollup").read_text()
    return Start(cpu_s, wall_s, _kib(status, "VmRSS") / 1024, _kib(rollup, "Pss") / 1024)


def _kib(told: str, name: str) -> int:
    """Return a line of ``/proc/PID/status`` or ``smaps_rollup``. Source: proc(5)."""
    return int(told.partition(f"\n{name}:")[2].split()[0])


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def measure(rounds: int) -> dict[str, list[Start]]:
    """Start everything once to write the bytecode, then ``rounds`` times."""
    with opened("sink") as store, tempfile.TemporaryDirectory() as folder:
        rows: dict[str, Callable[[], Start]] = {name: partial(of_imports, code) for name, code in IMPORTS.items()}
        # A new folder each: in a used one the sidecar would first wait for the one that was killed.
        rows |= {
            FILE: lambda: of_sidecar(store, CKPT_STORE=f"file://{tempfile.mkdtemp(dir=folder)}"),
            S3: lambda: of_sidecar(store),
        }
        for start in rows.values():
            start()
        measured: dict[str, list[Start]] = {name: [] for name in rows}
        for _ in range(rounds):
            for name, start in rows.items():
                measured[name].append(start())
    return measured


def table(measured: dict[str, list[Start]]) -> str:
    """Return medians, and in brackets their ratio to the row of all imports."""
    medians = {name: _median(starts) for name, starts in measured.items()}
    limit = medians["all of these"]
    rounds = len(measured[S3])
    lines = [
        f"medians of {rounds} starts with bytecode, interleaved; (times the imports of 'all of these')\n",
        f"{'':<18}" + "".join(f"{title:>16}" for title in ("CPU s", "wall s", "RSS MiB", "PSS MiB")),
    ]
    for name, start in medians.items():
        pairs = zip(asdict(start).values(), asdict(limit).values(), strict=True)
        cells = [f"{cost:.{digits}f} ({cost / least:.1f})" for (cost, least), digits in zip(pairs, (2, 2, 1, 1), strict=True)]
        lines.append(f"{name:<18}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _median(starts: list[Start]) -> Start:
    return Start(*(statistics.median(column) for column in zip(*(asdict(s).values() for s in starts), strict=True)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write every start to this file")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    measured = measure(options.rounds)
    print(table(measured))
    if options.json:
        write(options.json, {name: [asdict(s) for s in starts] for name, starts in measured.items()})


if __name__ == "__main__":
    main()
