"""Cost of transfers for the client: CPU, memory and time of this project's sidecar, of its peers and of plain sockets.

    python -m benchmarks.transfer --store sink,rgw --direction up,down --work big,small --rounds 3

The sidecar is the real process on a volume: from the marker to the commit, or from the request to the published checkpoint.
Peers run as programs of their own; the cost of the same program with one file of 1 KiB, its start, is subtracted from CPU and
wall time, not from the peak of memory. Rounds are interleaved. Downloads are compared with the uploaded files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import cost, ours, stores, work
from benchmarks.cost import Cost, Failed
from benchmarks.options import some_of
from benchmarks.peers import PEERS
from benchmarks.report import OURS, Result, table
from benchmarks.results import write
from benchmarks.stores import BUCKET, StoreServer

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = ROOT / ".venv-peers/bin/python"
DIRECTIONS = ("up", "down")
START_BYTES = 1 << 10


@dataclass
class Bench:
    """One store, one kind of files."""

    store: StoreServer
    files: Path
    start_files: Path
    scratch: Path
    peers_python: Path
    _names: int = field(default=0)

    def measure(self, name: str, direction: str) -> Cost:
        """Let a client do the transfer once.

        Raises:
            Failed: It did not, or not all of it arrived.
        """
        if name != OURS:
            return self._peer(name, direction, self.files, "work")
        if direction == "up":
            with self._fresh_prefix() as prefix:
                return ours.upload(self.store, prefix, self.files, self.scratch)
        return ours.download(self.store, "work", self.scratch, lambda folder: _compare(self.files, folder))

    def prepare_download(self) -> None:
        """Put the files to download into the store without verification, because downloads are compared afterwards."""
        for prefix, files in (("work", self.files), ("start", self.start_files)):
            ours.upload(self.store, prefix, files, self.scratch, CKPT_VERIFY="off")

    def start(self, name: str, direction: str) -> Cost | None:
        """Return the cost of a peer's start; None if the measurement does not include it."""
        if name == OURS or PEERS[name].measures_itself:
            return None
        return self._peer(name, direction, self.start_files, "start")

    def _peer(self, name: str, direction: str, files: Path, stored: str) -> Cost:
        if direction == "up":
            with self._fresh_prefix() as prefix:
                return self._run_peer(name, direction, prefix, files)
        folder = self.scratch / "download"
        folder.mkdir()
        try:
            spent = self._run_peer(name, direction, f"{stored}/{ours.CHECKPOINT}", folder)
            _compare(files, folder)
        finally:
            shutil.rmtree(folder)
        return spent

    def _run_peer(self, name: str, direction: str, prefix: str, folder: Path) -> Cost:
        # The limit needs boto3 and what it builds, not the peers' environment.
        python = sys.executable if PEERS[name].measures_itself else str(self.peers_python)
        module = f"benchmarks.peers.{PEERS[name].module}"
        command = [python, "-m", module, direction, self.store.endpoint, BUCKET, prefix, str(folder)]
        return cost.of_process(command, self.store.client_environ() | {"PYTHONPATH": str(ROOT)})

    @contextlib.contextmanager
    def _fresh_prefix(self) -> Iterator[str]:
        self._names += 1
        prefix = f"up-{self._names}"
        try:
            yield prefix
        finally:
            self.store.remove(f"{prefix}/")


def _compare(want: Path, got: Path) -> None:
    if difference := work.difference(want, got):
        raise Failed(f"downloaded: {difference}")


def rounds(bench: Bench, names: list[str], count: int, result: Result) -> None:
    """Measure each client once per round, in turns, so that a noisy minute does not hit one of them alone."""
    for number in range(-1, count):  # the first start of each fills the page cache and does not count
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name in result.failed:
                continue
            try:
                start = bench.start(name, result.direction)
                if number < 0:
                    continue
                if start:
                    result.starts.setdefault(name, []).append(start)
                result.costs.setdefault(name, []).append(bench.measure(name, result.direction))
            except Failed as failed:
                result.failed[name] = str(failed)


def run(kind: str, direction: str, what: str, options: argparse.Namespace) -> Result:
    """Measure all clients with one store, direction and kind of files."""
    memory = work.memory_folder(options.mib * work.MIB)
    with tempfile.TemporaryDirectory(dir=memory, prefix="bench-") as folder:
        files, start_files, scratch, kept = (Path(folder, name) for name in ("files", "start", "scratch", "kept"))
        work.prepare(what, files, mib=options.mib)
        start_files.mkdir()
        work.write_random(start_files / "start", START_BYTES)
        scratch.mkdir()
        kept.mkdir()
        work.touch_memory(scratch, 3 * work.size_bytes(files))
        result = Result(kind, direction, what, work.size_bytes(files), options.rounds)
        with stores.opened(kind, keep_in=kept if direction == "down" else None) as store:
            bench = Bench(store, files, start_files, scratch, options.peers_python)
            if direction == "down":
                bench.prepare_download()
            rounds(bench, options.only, options.rounds, result)
    return result


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    clients = (OURS, *PEERS)
    parser.add_argument("--store", type=some_of(stores.KINDS), default=["sink"], help=",".join(stores.KINDS))
    parser.add_argument("--direction", type=some_of(DIRECTIONS), default=list(DIRECTIONS), help=",".join(DIRECTIONS))
    parser.add_argument("--work", type=some_of(work.KINDS), default=["big"], help=",".join(work.KINDS))
    parser.add_argument("--mib", type=int, default=1024, help="size of the files together; small ones have their own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=some_of(clients), default=list(clients), help=",".join(clients))
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    default = PEERS_PYTHON if PEERS_PYTHON.exists() else Path(sys.executable)
    parser.add_argument("--peers-python", type=Path, default=default, help="interpreter that has the peers (make bench-peers)")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print a table per combination, and write the file."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and folders are left tidily
    os.chdir(ROOT)
    results = []
    for kind, what, direction in ((k, w, d) for k in options.store for w in options.work for d in options.direction):
        result = run(kind, direction, what, options)
        print(table(result), flush=True)
        results.append(asdict(result))
        if options.json:
            write(options.json, results)


if __name__ == "__main__":
    main()
