"""Slowdown of training by uploads beside it: steps per second of a small training loop while

- nothing is uploaded,
- the sidecar uploads checkpoint after checkpoint, a process of its own,
- a thread of the training process does so with s3fs, as the Kubeflow SDK does.

    python -m benchmarks.neighbour [--seconds 10] [--rounds 5] [--mib 256] [--mbit 1000] [--store sink|link]

The store accepts the rate of a network: --mbit for the sink, or the shaped link. Continuous uploads are the worst case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ours, stores, work
from benchmarks.results import write
from benchmarks.stores import BUCKET, StoreServer
from benchmarks.transfer import PEERS_PYTHON, ROOT

ALONE, BESIDE, INSIDE = "alone", "beside the sidecar", "with s3fs in a thread"


@dataclass(frozen=True)
class Rates:
    """Rates of one run of the training loop."""

    steps_per_s: float
    uploads_per_s: float = 0.0


def train(store: StoreServer, options: argparse.Namespace, uploading: Path | None = None) -> Rates:
    """Run the training loop; with ``uploading``, it uploads that folder meanwhile."""
    where = [store.endpoint, BUCKET, "inside", str(uploading)] if uploading else []
    command = [str(options.peers_python), "-m", "benchmarks.neighbour_trainer", str(options.seconds), *where]
    environ = store.client_environ() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{options.peers_python} needs torch and s3fs: make bench-peers")
    return Rates(**json.loads(done.stdout.splitlines()[-1]))


def train_beside(store: StoreServer, options: argparse.Namespace, prefix: str, files: Path, scratch: Path) -> Rates:
    """Run the training loop while a sidecar uploads."""
    with ours.running(store, prefix, scratch, CKPT_RESUME="off") as sidecar, _publishing(sidecar, files) as uploaded:
        began_s = time.monotonic()
        rates = train(store, options)
        return Rates(rates.steps_per_s, len(uploaded) / (uploaded[-1] - began_s) if uploaded else 0.0)


@contextlib.contextmanager
def _publishing(sidecar: ours.Sidecar, files: Path) -> Iterator[list[float]]:
    """Upload checkpoints one after the other; the list gets the time at which each became durable."""
    over, uploaded = threading.Event(), list[float]()

    def publish() -> None:
        step = 0
        while not over.is_set():
            step += 1
            sidecar.publish(files, f"checkpoint-{step}")
            uploaded.append(time.monotonic())

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield uploaded
    finally:
        over.set()
        thread.join()


def measured(options: argparse.Namespace) -> dict[str, list[Rates]]:
    """Run the three in turns."""
    by_mode: dict[str, list[Rates]] = {ALONE: [], BESIDE: [], INSIDE: []}
    memory = work.memory_folder(options.mib * work.MIB)
    with tempfile.TemporaryDirectory(dir=memory, prefix="bench-") as folder:
        files, scratch = Path(folder, "files"), Path(folder, "scratch")
        work.prepare("four", files, mib=options.mib)
        scratch.mkdir()
        with stores.opened(options.store, mbit_per_s=options.mbit) as store:
            for number in range(options.rounds):
                by_mode[ALONE].append(train(store, options))
                by_mode[BESIDE].append(train_beside(store, options, f"beside-{number}", files, scratch))
                by_mode[INSIDE].append(train(store, options, files))
    return by_mode


def table(by_mode: dict[str, list[Rates]], mib: int) -> str:
    """Return medians, and the loss compared with training alone in the same round."""
    lines = [f"{'training':<24}{'steps/s':>10}{'slowdown':>10}{'uploads':>14}"]
    for name, runs in by_mode.items():
        steps_per_s = statistics.median(rates.steps_per_s for rates in runs)
        slowdown = statistics.median(
            1 - run.steps_per_s / alone.steps_per_s for run, alone in zip(runs, by_mode[ALONE], strict=True)
        )
        mib_per_s = mib * statistics.median(rates.uploads_per_s for rates in runs)
        lines.append(f"{name:<24}{steps_per_s:>10.1f}{slowdown:>10.1%}{mib_per_s:>8.0f} MiB/s")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=256, help="size of a checkpoint")
    parser.add_argument("--mbit", type=int, default=stores.LINK_MBIT_PER_S, help="rate of the sink")
    parser.add_argument("--store", choices=("sink", "link"), default="sink")
    parser.add_argument("--json", type=Path)
    default = PEERS_PYTHON if PEERS_PYTHON.exists() else Path(sys.executable)
    parser.add_argument("--peers-python", type=Path, default=default, help="interpreter that has torch and s3fs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(ROOT)
    by_mode = measured(options)
    print(table(by_mode, options.mib))
    if options.json:
        write(options.json, {name: [asdict(rates) for rates in runs] for name, runs in by_mode.items()})


if __name__ == "__main__":
    main()
