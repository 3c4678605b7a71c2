"""What a store of many checkpoints costs: ``python -m benchmarks.growth [--store rgw,file] [--checkpoints 0,5000,50000]``.

Fills a prefix with small committed checkpoints and measures, on an empty volume: the start until ``/readyz``, the decision of a
resume of the newest, and then, with a retention that keeps all of them (``CKPT_KEEP_EVERY_STEPS``), CPU time, wall time and
requests of a commit, and the CPU time of a change on the volume that means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from benchmarks.listing import ATTEMPT
from benchmarks.options import some_of
from sidecar.core.commit.commit import commit_of, manifest_of
from sidecar.core.format import checksum, keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry, encode
from sidecar.daemon.settings import from_environment
from sidecar.store.opening import open_anywhere
from sidecar.store.protocol import Store
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.campaign.campaign import stores
from tests.campaign.run import BUCKET
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint
from tests.soak import samples
from tests.soak.way import CountingProxy
from trainer_hook.contract import Node, rfc3339, step_of

KINDS = ("file", "rgw", "minio", "moto")
STEPS = 10
THREADS = 8
CONTENT = b"{}"
COMMITS = 6
CHANGES = 20
SETTLES_S = 14.0
"""From a commit until retention may count it."""
IDLE_S, IDLE_SHARE = 3.0, 0.03
"""A sidecar that takes no more of a core for so long has nothing to do."""
RETENTION = {"CKPT_KEEP_STORE": "2", "CKPT_KEEP_EVERY_STEPS": str(STEPS), "CKPT_RESUME": "off"}


@dataclass(frozen=True)
class Row:
    """Costs at one number of checkpoints; of starts and decisions the median."""

    checkpoints: int
    ready_s: float
    """From the start of the process to ``/readyz``."""
    decided_s: float
    """From ``POST /v1/resume`` to the answer; the checkpoint has 2 bytes."""
    commit_cpu_ms: float
    """Of the whole process, with retention."""
    commit_s: float
    """From the marker to the commit."""
    commit_requests: float
    """With those of retention; ``nan``: a folder."""
    change_cpu_ms: float
    """Of the scan after a change on the volume."""
    slowest_answer_ms: float
    """Of ``/healthz`` during the commits: how long the event loop was held."""
    rss_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=some_of(KINDS), default=["file", "rgw"])
    parser.add_argument("--checkpoints", default="0,5000", help="in this order, each more than the one before")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    counts = [int(count) for count in given.checkpoints.split(",")]
    with tempfile.TemporaryDirectory() as scratch, _endpoints(given.store, Path(scratch)) as endpoints:
        for kind in given.store:
            print(
                f"\n{kind}, medians of {given.rounds}, load {os.getloadavg()[0]:.0f}\n" + _line([f.name for f in fields(Row)])
            )
            settings = _settings(kind, endpoints, Path(scratch))
            for count in counts:
                took_s = filled(settings, count)
                row = measured(settings, endpoints.get(kind), count, rounds=given.rounds)
                told = _line([f"{getattr(row, field.name):.3f}".rstrip("0").rstrip(".") for field in fields(Row)])
                print(f"{told}   filled in {took_s:.0f} s, load {os.getloadavg()[0]:.0f}", flush=True)


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>19}" for cell in cells)


@contextlib.contextmanager
def _endpoints(kinds: Sequence[str], scratch: Path) -> Iterator[dict[str, str]]:
    wanted = [kind for kind in kinds if kind != "file"]
    with stores(wanted, scratch / "servers") as (endpoints, missing):
        if missing:
            sys.exit("; ".join(missing.values()))
        yield endpoints


def _settings(kind: str, endpoints: Mapping[str, str], scratch: Path) -> dict[str, str]:
    if kind == "file":
        (scratch / "store").mkdir()
        return {"CKPT_STORE": f"file://{scratch / 'store'}"}
    return {
        "CKPT_STORE": f"s3://{BUCKET}/growth-{uuid.uuid4().hex[:8]}",
        "AWS_S3_ENDPOINT": endpoints[kind],
        "AWS_DEFAULT_REGION": servers.REGION,
        "CKPT_CREDENTIALS_DIR": str(servers.write_credentials(scratch / f"keys-{kind}")),
    }


def filled(settings: Mapping[str, str], count: int) -> float:
    """Write the committed checkpoints that are missing, one small file each; return the seconds it took."""
    began_s = time.monotonic()
    store = open_anywhere(from_environment({**settings, "CKPT_DIR": "/tmp"}))
    there = set(store.list_folders()) if count else set()
    put = _put_plainly if settings["CKPT_STORE"].startswith("file:") else _put
    names = [f"checkpoint-{STEPS * number}" for number in range(1, count + 1)]
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(_fill, partial(put, store)), [name for name in names if name not in there]))
    store.close()
    return time.monotonic() - began_s


def _fill(put: Callable[[str, bytes], str], name: str) -> None:
    key = keys.shared_file(name, "model.bin")
    crc = checksum.text_of(CONTENT)
    entry = FileEntry(path="model.bin", key=key, size_bytes=len(CONTENT), crc64nvme=crc, etag=put(key, CONTENT))
    at_s = time.time() - 1e6 + (step_of(name) or 0)
    manifest = manifest_of(Finished(name, "v", step_of(name), None, ATTEMPT, Node(), at_s, 1, (), {}), [entry])
    raw = encode(manifest)
    put(keys.manifest(name, ATTEMPT, Node()), raw)
    put(keys.commit(name), encode(commit_of([manifest], {0: raw}, committed_at=rfc3339(at_s))))


def _put(store: Store, key: str, content: bytes) -> str:
    """Write an object through the wire for bodies, which costs less than the client for documents."""
    fd = os.memfd_create("object")
    try:
        os.write(fd, content)
        return store.put_file(key, FileSlice(fd, 0, len(content), gate=OpenGate())).etag
    finally:
        os.close(fd)


def _put_plainly(store: Store, key: str, content: bytes) -> str:
    """Write an object of a folder without waiting for the disk."""
    path = Path(store.url.removeprefix("file://"), key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return store.stat(key).etag


def measured(settings: Mapping[str, str], endpoint: str | None, count: int, *, rounds: int) -> Row:
    """Return the costs of a store as it is now."""
    with tempfile.TemporaryDirectory() as folder:
        starts = [_start(settings, Path(folder) / str(number), count) for number in range(rounds)]
        ready_s, decided_s = (statistics.median(column) for column in zip(*starts, strict=True))
        if endpoint is None:
            return Row(count, ready_s, decided_s, *_commits(settings, Path(folder) / "commits", count, None))
        proxy = CountingProxy(endpoint, seed=0)
        with proxy.running() as way:
            through = {**settings, "AWS_S3_ENDPOINT": way}
            return Row(count, ready_s, decided_s, *_commits(through, Path(folder) / "commits", count, proxy))


def _start(settings: Mapping[str, str], volume: Path, count: int) -> tuple[float, float]:
    began_s = time.monotonic()
    with sidecar(volume, {**settings, "CKPT_RESUME": "on-demand"}, within=("env",)) as running:
        running.ready()
        ready_s, began_s = time.monotonic() - began_s, time.monotonic()
        answer = running.resume()
        decided_s = time.monotonic() - began_s
        if answer.get("checkpoint") != (f"checkpoint-{STEPS * count}" if count else None):
            sys.exit(f"the resume of {count} checkpoints gave {answer}")
        running.terminate()
    return ready_s, decided_s


def _commits(
    settings: Mapping[str, str], volume: Path, count: int, proxy: CountingProxy | None
) -> tuple[float, float, float, float, float, float]:
    with sidecar(volume, {**settings, **RETENTION}, within=("env",)) as running:
        running.ready()
        _commit(running, STEPS * count + 1)
        time.sleep(SETTLES_S)
        _until_idle(running)  # after its start, retention has read all that is there
        requests, cpu_s, took_s, slowest_ms = _asked(proxy), _cpu_s(running), [], 0.0
        for number in range(COMMITS):
            took, slowest = _commit(running, STEPS * count + 2 + number)
            took_s.append(took)
            slowest_ms = max(slowest_ms, slowest)
        end_s = time.monotonic() + SETTLES_S
        while time.monotonic() < end_s:  # retention counts them, and deletes those before
            slowest_ms = max(slowest_ms, _answer_ms(running))
            time.sleep(0.2)
        cost_ms, asked = (_cpu_s(running) - cpu_s) / COMMITS * 1000, (_asked(proxy) - requests) / COMMITS
        change_ms, memory = _changes(running), samples.of_memory(running.process.pid)
        shutil.rmtree(volume / "nothing", ignore_errors=True)
        running.terminate()
    return cost_ms, statistics.median(took_s), asked, change_ms, slowest_ms, memory["RSS"]


def _commit(running: Sidecar, step: int) -> tuple[float, float]:
    """Return the seconds until a small checkpoint was durable, and the slowest answer meanwhile."""
    began_s, slowest_ms, name = time.monotonic(), 0.0, f"checkpoint-{step}"
    write_checkpoint(running.volume, name, {"model.bin": CONTENT}, {})

    def is_durable() -> bool:
        nonlocal slowest_ms
        slowest_ms = max(slowest_ms, _answer_ms(running))
        return any(event["checkpoint"] == name for event in running.events("checkpoint_committed"))

    until(is_durable, timeout_s=120, what=running.log)
    return time.monotonic() - began_s, slowest_ms


def _answer_ms(running: Sidecar) -> float:
    began_s = time.perf_counter()
    running.call("GET", "/healthz", timeout_s=120)
    return (time.perf_counter() - began_s) * 1000


def _changes(running: Sidecar) -> float:
    cpu_s = _cpu_s(running)
    for _ in range(CHANGES):
        (running.volume / "nothing").mkdir(exist_ok=True)
        time.sleep(0.3)
        (running.volume / "nothing").rmdir()
        time.sleep(0.3)
    return (_cpu_s(running) - cpu_s) / CHANGES / 2 * 1000


def _until_idle(running: Sidecar) -> None:
    while True:
        cpu_s = _cpu_s(running)
        time.sleep(IDLE_S)
        if _cpu_s(running) - cpu_s < IDLE_S * IDLE_SHARE:
            return


def _cpu_s(running: Sidecar) -> float:
    return samples.of_processor(running.process.pid)["CPU seconds"]


def _asked(proxy: CountingProxy | None) -> float:
    return float("nan") if proxy is None else float(sum(proxy.asked.values()))


if __name__ == "__main__":
    main()
