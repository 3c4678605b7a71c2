"""A network path that damages all that is read says nothing about what the store holds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.bucket import Bucket, random_bytes
from tests.faults.plan import Fault, Kind
from tests.faults.proxy import FaultProxy
from tests.faults.wire import Request
from tests.process.sidecar_process import contents, sidecar, write_checkpoint

DAMAGE_S = 3.0


@pytest.mark.slow
def test_seconds_of_damage_on_the_way_down_cost_no_checkpoint(moto_bucket: Bucket, tmp_path: Path) -> None:
    files = {"model": random_bytes(3_000_000, 1), "optimizer": random_bytes(50_000, 2), "rng": b"1"}
    steps = [f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)]
    with sidecar(tmp_path / "volume", moto_bucket.settings()) as running:
        running.ready()
        for name in steps:
            write_checkpoint(running.volume, name, files)
            running.committed(name)
    began_s: list[float] = []

    def damaged(request: Request) -> Fault | None:
        if request.method != "GET":
            return None
        began_s.append(time.monotonic())
        return Fault(Kind.CORRUPT_DOWNLOAD) if began_s[-1] - began_s[0] < DAMAGE_S else None

    proxy = FaultProxy(moto_bucket.endpoint)
    settings = {"CKPT_RESUME": "on-demand"}
    with (
        proxy.running() as endpoint,
        sidecar(tmp_path / "new-volume", moto_bucket.settings(endpoint) | settings) as running,
    ):
        running.ready()
        proxy.plan = damaged
        answer = running.resume()
        assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-5"), answer
        assert contents(running.volume / "checkpoint-5") == files
        assert running.status()["bad"] == {}
        proxy.plan = lambda _: None
    assert began_s[-1] - began_s[0] > DAMAGE_S, "it was damaged for as long"
    assert len([at_s for at_s in began_s if at_s - began_s[0] < DAMAGE_S]) < 60, "and it was not asked for without pause"
