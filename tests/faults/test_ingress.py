"""An ingress before the store: it takes bodies whole and forwards them over a slow link, or refuses large ones."""

from __future__ import annotations

import threading
from pathlib import Path

from tests import servers
from tests.faults.bucket import MIB, Bucket, random_bytes
from tests.faults.proxy import FaultProxy
from tests.process.sidecar_process import sidecar, until, write_checkpoint

SIZE_BYTES = 8 * MIB
BYTES_PER_S = 2.0 * MIB


def model(seed: int, size_bytes: int) -> dict[str, bytes]:
    return {"model.safetensors": random_bytes(size_bytes, seed)}


def test_a_slow_link_behind_a_buffering_proxy_carries_a_checkpoint_about_once(moto_bucket: Bucket, tmp_path: Path) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    proxy.buffers_bodies = True
    own = {"CKPT_RESUME": "off", "CKPT_PART_SIZE": str(5 * MIB)}
    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | own) as running:
        running.ready()
        proxy.bytes_per_s = BYTES_PER_S
        files = [("checkpoint-1", model(1, SIZE_BYTES)), ("checkpoint-2", model(2, SIZE_BYTES))]
        for name, written in files:
            write_checkpoint(running.volume, name, written)
            running.committed(name, timeout_s=60)
        assert running.terminate() == 0
    times = sum(exchange.received_bytes for exchange in proxy.log) / (len(files) * SIZE_BYTES)
    assert times < 1.8, "the link carried the checkpoints more than once"
    for name, written in files:
        moto_bucket.assert_holds(name, written)


def test_a_body_that_a_proxy_refuses_for_its_size_is_named_until_it_is_taken(moto_bucket: Bucket, tmp_path: Path) -> None:
    is_small = threading.Event()

    def body_limit(request: servers.Request) -> servers.ProxyAnswer | None:
        if len(request.body) <= MIB or is_small.is_set():
            return None
        return 413, {"Content-Type": "text/html"}, b"<html>413 Request Entity Too Large</html>"

    files = {"model.safetensors": random_bytes(2 * MIB, 3), "config.json": b"{}"}
    settings = {"CKPT_RESUME": "off"}
    with (
        servers.Proxy(moto_bucket.endpoint, body_limit).running() as endpoint,
        sidecar(tmp_path / "volume", moto_bucket.settings(endpoint) | settings) as running,
    ):
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", files)
        until(lambda: running.status()["retries"] >= 3)
        running.call("GET", "/v1/checkpoints")  # which the store answers
        status = running.status()
        assert status["degraded"]
        assert "client_max_body_size" in status["degraded_reason"]
        assert len(running.events("store_degraded")) <= 2, "each says it once more"
        is_small.set()
        running.committed("checkpoint-1", timeout_s=60)
        assert not running.status()["degraded"]
        assert running.terminate() == 0
    moto_bucket.assert_holds("checkpoint-1", files)
