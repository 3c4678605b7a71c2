"""A store that hangs, is away, or refuses: what is said of it meanwhile, and what is sent first once it is back."""

from __future__ import annotations

import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.api.training import training
from tests.faults.bucket import MIB, Bucket, random_bytes
from tests.faults.plan import Fault, Kind, nothing
from tests.faults.proxy import FaultProxy
from tests.faults.wire import Request
from tests.process.conftest import MotoProcess
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

GRACE_S = 10.0
BODIES = ("PutObject", "CreateMultipartUpload", "UploadPart")


def away(_: Request) -> Fault:
    return Fault(Kind.RESET_BEFORE)


def uploads_hang(request: Request) -> Fault | None:
    return Fault(Kind.SILENT_REQUEST) if request.operation in BODIES else None


def uploads_refused(request: Request) -> Fault | None:
    """As a proxy does that knows nothing of S3."""
    return Fault(Kind.BARE_404) if request.operation in BODIES else None


def safety(running: Sidecar) -> Any:
    return running.call("GET", "/v1/overview")["safety"]


def asked(proxy: FaultProxy, *, more: int) -> None:
    """Wait until some more requests have come to the store."""
    before = len(proxy.log)
    until(lambda: len(proxy.log) >= before + more, what="the store is asked again")


def begin(running: Sidecar, trainer: Any) -> None:
    """Train until a save at SIGTERM is known to fit."""
    trainer.at(10)
    trainer.save(10, 6 * MIB)
    running.committed("checkpoint-10")
    trainer.at(77)
    until(lambda: safety(running)["level"] == "safe", what=lambda: str(safety(running)))


def metrics(running: Sidecar) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/metrics") as answer:
        return str(answer.read().decode())


def test_a_store_that_hangs_is_not_called_safe_for_longer_than_the_grace_period(
    moto_process: MotoProcess, tmp_path: Path
) -> None:
    settings = moto_process.settings(prefix="run") | {"CKPT_GRACE_SECONDS": str(int(GRACE_S))}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        with training(running.volume) as trainer:
            begin(running, trainer)
            assert safety(running)["sigterm"]["lost"] == "nothing"
            moto_process.pause()
            hangs_s, levels = time.monotonic(), set[str]()
            while "danger" not in levels:
                overview = running.call("GET", "/v1/overview")
                since_s = time.monotonic() - hangs_s
                levels.add(overview["safety"]["level"])
                if overview["safety"]["level"] != "safe":
                    assert overview["at_risk"]["fits_grace"] is not True
                    assert overview["safety"]["sigterm"]["lost"] in ("not known", "67 steps")
                else:
                    assert since_s < GRACE_S + 5, "safe is a claim about now"
                assert since_s < 60, "a silent store is a danger"
                time.sleep(0.2)
            assert "unknown" in levels, "before that it is late, and nobody knows"
            now = safety(running)
            assert now["headline"] == "The store does not answer: nothing becomes durable until it does"
            assert now["sigterm"] == {"lost": "67 steps", "why": "the store does not answer"}
            assert 'checkpoint_sidecar_safety{level="danger"} 1.0' in metrics(running)
            assert "checkpoint_sidecar_fits_grace 0.0" in metrics(running)
            said = running.command("status").stdout
            assert "safety     danger: The store does not answer" in said
            assert "SIGTERM    costs 67 steps: the store does not answer\n" in said
            moto_process.go_on()
            until(lambda: safety(running)["level"] == "safe", what=lambda: str(safety(running)))
            assert safety(running)["sigterm"]["lost"] == "nothing"


@pytest.mark.parametrize(
    ("fault", "headline"),
    [
        (away, "The store cannot be used: nothing becomes durable until it answers again"),
        (uploads_refused, "The store refuses uploads: nothing becomes durable until it takes them"),
    ],
    ids=["away", "refuses"],
)
def test_a_store_that_takes_nothing_is_a_danger_and_a_sigterm_costs_all_since_the_newest_durable_step(
    fault: Any, headline: str, moto_bucket: Bucket, tmp_path: Path
) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    with (
        proxy.running() as endpoint,
        sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | {"CKPT_GRACE_SECONDS": "20"}) as running,
    ):
        running.ready()
        with training(running.volume) as trainer:
            begin(running, trainer)
            proxy.plan = fault
            trainer.save(77, 6 * MIB)
            until(lambda: safety(running)["headline"] == headline, what=lambda: str(safety(running)))
            overview = running.call("GET", "/v1/overview")
            assert overview["at_risk"]["fits_grace"] is False
            assert (overview["at_risk"]["predicted_durable_s"], overview["at_risk"]["advice"]) == (None, None)
            assert overview["safety"]["sigterm"]["lost"] == overview["safety"]["kill"]["lost"] == "67 steps"
            assert "SIGTERM    costs 67 steps: the store" in running.command("status").stdout
            proxy.plan = nothing
            running.committed("checkpoint-77")
            until(lambda: safety(running)["level"] == "safe", what=lambda: str(safety(running)))
            assert safety(running)["kill"] == {"lost": "nothing", "why": "everything trained is durable"}


def test_a_store_that_takes_no_upload_and_answers_the_rest_is_not_called_safe(moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    with (
        proxy.running() as endpoint,
        sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | {"CKPT_GRACE_SECONDS": "20"}) as running,
    ):
        running.ready()
        with training(running.volume) as trainer:
            begin(running, trainer)
            proxy.plan = uploads_hang
            trainer.save(77, 6 * MIB)
            until(lambda: safety(running)["level"] == "unknown", what=lambda: str(safety(running)))
            assert "uploads have not moved for" in safety(running)["headline"]


@pytest.mark.parametrize("pending", [1, 6])
def test_an_outage_is_told_once_however_many_checkpoints_wait(pending: int, moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        running.ready()
        proxy.plan = away
        for step in range(1, pending + 1):
            write_checkpoint(running.volume, f"checkpoint-{step}", {f"{n}.bin": b"x" * 100 for n in range(9)}, {})
        until(lambda: running.events("store_degraded"))
        asked(proxy, more=4)
        proxy.plan = nothing
        for step in range(1, pending + 1):
            running.committed(f"checkpoint-{step}")
        told = [event["event"] for event in running.events() if event["level"] in ("warning", "error")]
        assert told.count("store_degraded") <= 2, "once more where an answer was under way when it went away"
        assert set(told) <= {"store_degraded", "no_heartbeat", "orphan_uploads_not_aborted"}, "and no line for each request"
        assert len(told) <= 5
        assert until(lambda: running.events("store_reached_again"))[-1]["failures"] >= 1
        assert running.terminate() == 0


def test_while_the_store_is_away_one_small_request_asks_for_it(moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    settings = {"CKPT_NODE_INDEX": "0", "CKPT_NODE_COUNT": "1"}
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | settings) as running:
        running.ready()
        proxy.plan = away
        for step in range(1, 6):
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": random_bytes(MIB, step)}, {})
        until(lambda: running.events("store_degraded"))
        asked(proxy, more=4)
        began = len(proxy.log)
        until(lambda: sum(e.operation == "GetObject" for e in proxy.log[began:]) >= 3)
        assert not [e for e in proxy.log[began:] if e.operation in BODIES], "a body is not what asks whether the store is back"


def test_after_a_void_notice_a_store_that_is_away_is_not_hammered(moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    settings = {"CKPT_GRACE_SECONDS": "1", "CKPT_NODE_INDEX": "1", "CKPT_NODE_COUNT": "2"}  # node 0 beats besides
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | settings) as running:
        running.ready()
        running.call("POST", "/v1/drain")
        until(lambda: running.events("termination_void"))
        proxy.plan = away
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"x"}, {})
        until(lambda: running.events("store_degraded"))
        began = len(proxy.log)

        def pauses_s() -> list[float]:
            asked_s = [exchange.began_s for exchange in proxy.log[began:] if exchange.key.endswith("/run.json")]
            return [after - before for before, after in pairwise(asked_s)]

        until(lambda: max(pauses_s(), default=0.0) > 1.5, what=lambda: str(pauses_s()))


@pytest.mark.parametrize("is_under_way", [False, True], ids=["while-away", "under-way"])
def test_after_an_outage_the_newest_checkpoint_is_sent_first(is_under_way: bool, moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    settings = {"CKPT_CONCURRENCY": "2", "CKPT_PART_SIZE": "5Mi"}
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | settings) as running:
        running.ready()
        proxy.bytes_per_s = 4.0 * MIB
        proxy.plan = nothing if is_under_way else away
        for step in (10, 20, 30):
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": random_bytes(24 * MIB, step)}, {"step": step})
            if is_under_way and step == 10:
                until(lambda: sum(e.operation == "UploadPart" for e in proxy.log) >= 2)
                proxy.plan = away
        until(lambda: [waiting["checkpoint"] for waiting in running.status()["queue"]][:1] == ["checkpoint-30"])
        asked(proxy, more=2)
        until(lambda: not [e for e in proxy.log if e.operation == "UploadPart" and e.status is None and e.fault is None])
        began = len(proxy.log)
        proxy.plan = nothing
        for step in (10, 20, 30):
            running.committed(f"checkpoint-{step}")
        sent = [exchange.key for exchange in proxy.log[began:] if exchange.operation in BODIES and "model" in exchange.key]
        begun = [key for key in sent if not (is_under_way and "checkpoint-10/" in key)]  # parts in flight are finished
        assert "checkpoint-30/" in begun[0], sent
        order = [event["checkpoint"] for event in running.events("checkpoint_committed")]
        assert order == ["checkpoint-30", "checkpoint-20", "checkpoint-10"]
