"""A flush over a slow link plans with the rate that it measures itself: nobody has set a bandwidth limit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.bucket import MIB, Bucket
from tests.faults.proxy import FaultProxy
from tests.process.sidecar_process import sidecar, until, write_checkpoint

OLDER_BYTES, NEWER_BYTES = 16 * MIB, 400 * MIB
"""The older one is a single request, which has not arrived when the pod is told to end."""


@pytest.mark.slow
def test_without_a_limit_the_older_one_that_fits_is_finished(moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    grace = {"CKPT_RESUME": "off", "CKPT_GRACE_SECONDS": "14"}
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | grace) as running:
        running.ready()
        proxy.bytes_per_s = 4e6

        def sent_bytes() -> int:
            return sum(exchange.received_bytes for exchange in proxy.log if "checkpoint-10/model" in exchange.key)

        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(OLDER_BYTES)})
        until(lambda: sent_bytes() > OLDER_BYTES * 0.7)
        (running.volume / "checkpoint-20").mkdir()
        with (running.volume / "checkpoint-20/model").open("wb") as model:
            model.truncate(NEWER_BYTES)
        write_checkpoint(running.volume, "checkpoint-20", {}, {"reason": "jit"})
        until(lambda: any(e["checkpoint"] == "checkpoint-20" for e in running.events("checkpoint_finished")))
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == 3
        assert running.report["durable"] == ["checkpoint-10"]
        [given_up] = running.report["given_up"]
        assert "MB/s" in given_up["reason"], "a rate was measured"
        assert " 0.0 MB/s" not in given_up["reason"]
    moto_bucket.assert_holds("checkpoint-10", {"model": bytes(OLDER_BYTES)})
