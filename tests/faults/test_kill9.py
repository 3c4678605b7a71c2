"""SIGKILL at any instant: nothing is lost, nothing is committed twice, and little is sent or fetched twice."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import sleep

import pytest

from sidecar.core.lifecycle.phases import margin_s
from tests.faults.bucket import MIB, Bucket, random_bytes
from tests.faults.plan import Fault, Kind
from tests.faults.proxy import Exchange, FaultProxy
from tests.faults.wire import Request
from tests.process.sidecar_process import SCAN_S, Sidecar, contents, grow_until, sidecar, until, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS, KILLS = range(2), 5
PART_BYTES, PIECE_BYTES, CONCURRENCY = 5 * MIB, 16 * MIB, 2
GROWTH_BYTES, MOST_GROWTH_BYTES, STEP_BYTES = 24 * MIB, 32 * MIB, 6 * MIB
"""What is written of a file between two kills, where the machine is slow, and at once."""
SETTINGS = {"CKPT_PART_SIZE": "5Mi", "CKPT_CONCURRENCY": str(CONCURRENCY), "CKPT_KEEP_LOCAL": "99", "CKPT_RESUME": "off"}
COMMIT, MANIFEST = "/.complete", "/node-00000-of-00001.json"


def is_content(exchange: Exchange) -> bool:
    """Whether it carries a file of a checkpoint, up or down."""
    is_document = exchange.key.endswith((COMMIT, MANIFEST))
    return "/checkpoint-" in exchange.key and not is_document and exchange.operation in ("PutObject", "UploadPart", "GetObject")


def sent_bytes(proxy: FaultProxy) -> int:
    return sum(exchange.received_bytes for exchange in list(proxy.log) if is_content(exchange))


def fetched_bytes(proxy: FaultProxy) -> int:
    return sum(exchange.returned_bytes for exchange in list(proxy.log) if is_content(exchange))


def commits(proxy: FaultProxy, name: str) -> int:
    """How often the store wrote a commit."""
    puts = (e for e in proxy.log if e.operation == "PutObject" and e.key.endswith(f"/{name}{COMMIT}"))
    return sum(exchange.store_status == 200 for exchange in puts)


def size_bytes(files: Mapping[str, bytes]) -> int:
    return sum(map(len, files.values()))


class Series:
    """Checkpoints that a trainer writes one after the other."""

    def __init__(self, volume: Path, proxy: FaultProxy) -> None:
        self._volume, self._proxy = volume, proxy
        self.written: dict[str, dict[str, bytes]] = {}
        volume.mkdir()

    def write(self, *, model_bytes: int) -> None:
        step = len(self.written) + 1
        small = {f"small-{n}": random_bytes(10_000 * n, step) for n in range(6)}
        self.written[f"checkpoint-{step}"] = {"model": random_bytes(model_bytes + step, step)} | small
        write_checkpoint(self._volume, f"checkpoint-{step}", self.written[f"checkpoint-{step}"])

    def is_committed(self) -> bool:
        return all(commits(self._proxy, name) for name in self.written)

    def size_bytes(self) -> int:
        return sum(map(size_bytes, self.written.values()))

    def small_bytes(self) -> int:
        """Of the files that go in a request each: on a busy machine such a request is late, and a second one goes beside it."""
        return sum(len(content) for files in self.written.values() for name, content in files.items() if name != "model")


def ends_well(series: Series, proxy: FaultProxy, bucket: Bucket, *, kills: int) -> None:
    """All is committed once, whole, and without leftovers; what was sent twice is what was in flight at the kills."""
    assert {name: commits(proxy, name) for name in series.written} == dict.fromkeys(series.written, 1)
    for name, files in series.written.items():
        bucket.assert_holds(name, files)
    assert bucket.unfinished_uploads() == []
    assert sent_bytes(proxy) <= series.size_bytes() + series.small_bytes() + kills * CONCURRENCY * PART_BYTES


def wait_for_a_bad_moment(running: Sidecar, proxy: FaultProxy, series: Series, dice: random.Random) -> None:
    """Most often somewhere in a transfer; else at any time, also before the API is up."""
    if dice.random() < 0.2:
        sleep(dice.uniform(0.1, 1.5))
        return
    goal = sent_bytes(proxy) + dice.randrange(4 * MIB, 40 * MIB)
    until(lambda: sent_bytes(proxy) > goal or series.is_committed(), what=lambda: f"bytes sent; log:\n{running.log()[-2000:]}")


@pytest.mark.parametrize("seed", ROUNDS)
def test_uploads_killed_at_random_instants_end_as_if_they_had_not_been(seed: int, moto_bucket: Bucket, tmp_path: Path) -> None:
    dice, proxy, in_mid_transfer = random.Random(seed), FaultProxy(moto_bucket.endpoint), 0
    series = Series(tmp_path / "volume", proxy)
    with proxy.running() as endpoint:
        proxy.bytes_per_s = 80e6
        for _ in range(KILLS):
            if series.is_committed():
                series.write(model_bytes=60 * MIB)
            before = len(proxy.log)
            with sidecar(tmp_path / "volume", SETTINGS | moto_bucket.settings(endpoint)) as running:
                wait_for_a_bad_moment(running, proxy, series, dice)
                in_mid_transfer += any(is_content(e) and e.status is None for e in proxy.log[before:])
                running.kill()
        proxy.bytes_per_s = None
        with sidecar(tmp_path / "volume", SETTINGS | moto_bucket.settings(endpoint)) as running:
            until(series.is_committed, what=lambda: f"all committed; log:\n{running.log()[-2000:]}")
            assert running.terminate() == 0
    assert in_mid_transfer >= 2
    ends_well(series, proxy, moto_bucket, kills=KILLS)


@pytest.mark.parametrize("seed", [0])
def test_kills_while_a_checkpoint_is_being_written_cost_what_was_in_flight(
    seed: int, moto_bucket: Bucket, tmp_path: Path
) -> None:
    dice, proxy = random.Random(seed), FaultProxy(moto_bucket.endpoint)
    series, want = Series(tmp_path / "volume", proxy), random_bytes(KILLS * MOST_GROWTH_BYTES, seed)
    folder = tmp_path / "volume" / "checkpoint-1"
    folder.mkdir()
    with proxy.running() as endpoint, (folder / "optimizer.pt").open("wb", buffering=0) as file:
        proxy.bytes_per_s = 80e6
        for _ in range(KILLS):
            with sidecar(tmp_path / "volume", SETTINGS | moto_bucket.settings(endpoint)) as running:
                running.ready()
                goal = sent_bytes(proxy) + dice.randrange(GROWTH_BYTES // 3, GROWTH_BYTES * 2 // 3)
                for _ in range(GROWTH_BYTES // STEP_BYTES):
                    file.write(want[file.tell() :][:STEP_BYTES])
                    sleep(SCAN_S)
                what = f"bytes sent; log:\n{running.log()[-2000:]}"
                grow_until(file, want, lambda goal=goal: sent_bytes(proxy) > goal, what=what)
                running.kill()
        proxy.bytes_per_s = None
        with sidecar(tmp_path / "volume", SETTINGS | moto_bucket.settings(endpoint)) as running:
            series.written["checkpoint-1"] = {"optimizer.pt": want[: file.tell()]}
            (folder / ".complete").write_text("{}")
            until(series.is_committed, what=lambda: f"committed; log:\n{running.log()[-2000:]}")
            assert running.terminate() == 0
    ends_well(series, proxy, moto_bucket, kills=KILLS)


class Trap:
    """A plan that kills a sidecar when a certain request of its arrives: before the store gets it, or after it answered."""

    def __init__(self, operation: str, key: str, *, passes: bool) -> None:
        self._operation, self._key, self._passes = operation, key, passes
        self.prey: Sidecar | None = None
        self.shut = False

    def __call__(self, request: Request) -> Fault | None:
        if self.shut or self.prey is None or request.operation != self._operation or self._key not in request.key:
            return None
        return Fault(Kind.LOST_ANSWER if self._passes else Kind.RESET_BEFORE, on_cut=self._kill)

    def _kill(self) -> None:
        assert self.prey
        self.shut = True
        self.prey.process.kill()


@pytest.mark.parametrize("passes", [True, False], ids=["and-the-store-gets-it", "and-the-store-does-not"])
@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ("CreateMultipartUpload", "model"),
        ("UploadPart", "model"),
        ("CompleteMultipartUpload", "model"),
        ("PutObject", "small-5"),
        ("PutObject", MANIFEST),
        ("PutObject", "checkpoint-1/.complete"),
    ],
)
def test_an_upload_killed_at_a_turning_point_ends_as_if_it_had_not_been(
    operation: str, key: str, passes: bool, moto_bucket: Bucket, tmp_path: Path
) -> None:
    trap = Trap(operation, key, passes=passes)
    proxy = FaultProxy(moto_bucket.endpoint, trap)
    series = Series(tmp_path / "volume", proxy)
    with proxy.running() as endpoint:
        series.write(model_bytes=17 * MIB)
        with sidecar(tmp_path / "volume", SETTINGS | moto_bucket.settings(endpoint)) as running:
            trap.prey = running
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait()
            assert trap.shut, running.log()
        with sidecar(tmp_path / "volume", SETTINGS | moto_bucket.settings(endpoint)) as running:
            running.committed("checkpoint-1")
            assert running.terminate() == 0
    ends_well(series, proxy, moto_bucket, kills=1)


@pytest.mark.parametrize(
    ("operation", "key", "passes"),
    [
        ("UploadPart", "model", True),
        ("CompleteMultipartUpload", "model", True),
        ("PutObject", MANIFEST, False),
        ("PutObject", "checkpoint-1/.complete", True),
    ],
)
def test_a_flush_killed_at_a_turning_point_goes_on_in_what_is_left_of_the_grace_period(
    operation: str, key: str, passes: bool, moto_bucket: Bucket, tmp_path: Path
) -> None:
    trap, volume = Trap(operation, key, passes=passes), tmp_path / "volume"
    proxy, files = FaultProxy(moto_bucket.endpoint, trap), {"small": b"small", "model": random_bytes(17 * MIB, 1)}
    write_checkpoint(volume, "checkpoint-1", files)
    (volume / "checkpoint-1/.complete").unlink()
    with proxy.running() as endpoint, (volume / "checkpoint-1/model").open("r+b", buffering=0) as file:
        file.truncate(12 * MIB)
        settings = SETTINGS | moto_bucket.settings(endpoint) | {"CKPT_GRACE_SECONDS": "300"}
        with sidecar(volume, settings) as running:
            file.seek(12 * MIB)
            grow_until(file, files["model"], lambda: sent_bytes(proxy) > 5 * MIB, what="a part is sent early")
            trap.prey = running
            running.call("POST", "/v1/drain")
            file.write(files["model"][file.tell() :])
            (volume / "checkpoint-1/.complete").touch()
            assert running.wait() == -signal.SIGKILL
        with sidecar(volume, settings) as running:
            until(lambda: (running.ready().status()["termination"] or {}).get("source") == "api", what="the notice counts")
            assert running.status()["termination"]["deadline_in_s"] < 300 - margin_s(300)
            assert running.terminate() == 0
            assert running.report["newest_durable_step"] == 1
    moto_bucket.assert_holds("checkpoint-1", files)
    assert (moto_bucket.unfinished_uploads(), commits(proxy, "checkpoint-1")) == ([], 1)
    assert sent_bytes(proxy) <= size_bytes(files) + CONCURRENCY * PART_BYTES


LARGE = {"model": (160 * MIB, 1), "optimizer": (3 * MIB, 2), "empty": (0, 3)}


@pytest.fixture(scope="module")
def large(moto_endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A run with ``checkpoint-1``, most of which is one file of ten pieces."""
    made = Bucket(moto_endpoint)
    with sidecar(tmp_path_factory.mktemp("large") / "volume", made.settings()) as running:
        write_checkpoint(running.volume, "checkpoint-1", {path: random_bytes(*how) for path, how in LARGE.items()})
        running.committed("checkpoint-1", timeout_s=60)
    yield made
    made.close()


@pytest.mark.parametrize("seed", ROUNDS)
def test_a_resume_killed_at_random_instants_fetches_little_twice(seed: int, large: Bucket, tmp_path: Path) -> None:
    files = {path: random_bytes(*how) for path, how in LARGE.items()}
    dice, proxy = random.Random(seed), FaultProxy(large.endpoint)
    settings = large.settings() | {"CKPT_CONCURRENCY": "1", "CKPT_RESUME": "eager"}
    with proxy.running() as endpoint:
        settings["AWS_S3_ENDPOINT"] = endpoint
        proxy.bytes_per_s = 80e6
        for _ in range(KILLS):
            goal = fetched_bytes(proxy) + dice.randrange(20 * MIB, 36 * MIB)
            with sidecar(tmp_path / "volume", settings) as running:
                until(
                    lambda goal=goal: fetched_bytes(proxy) > goal, what=lambda: f"bytes fetched; log:\n{running.log()[-2000:]}"
                )
                running.kill()
            assert not (tmp_path / "volume/checkpoint-1").exists()
        proxy.bytes_per_s = None
        with sidecar(tmp_path / "volume", settings) as running:
            assert running.up().resume()["source"] == "store"
            assert contents(running.volume / "checkpoint-1") == files
    assert fetched_bytes(proxy) <= size_bytes(files) + KILLS * 1 * PIECE_BYTES
