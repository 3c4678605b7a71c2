"""An ingress that takes bodies whole and forwards them over a slow link: few bodies pass that link twice."""

from __future__ import annotations

from pathlib import Path

from tests.faults.bucket import MIB, Bucket, random_bytes
from tests.faults.proxy import FaultProxy
from tests.process.sidecar_process import sidecar, write_checkpoint

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
