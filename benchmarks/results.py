"""Results of benchmarks as JSON files, with the conditions under which they were measured.

    make demo JSON=1 | python -m benchmarks.results benchmarks/results/demo.json

stores the last line of a program's output in the same form.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("checkpoint-sidecar", "torch", "transformers", "boto3", "aiobotocore", "awscrt")


def write(path: Path, results: object) -> None:
    """Write results beside date, machine and versions of this moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions(), "results": results}, indent=1) + "\n")


def read(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the conditions and the results of a file."""
    document = json.loads(path.read_text())
    return document["conditions"], document["results"]


def conditions() -> dict[str, Any]:
    """Return the date (UTC), the machine, its load (runnable processes, one minute) and versions."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
            "kernel": platform.release(),
        },
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _versions() -> dict[str, str]:
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    write(Path(sys.argv[1]), json.loads(sys.stdin.read().splitlines()[-1]))
