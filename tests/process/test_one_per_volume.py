"""Two sidecars on one volume: a replacement pod starts on the node where the old one still flushes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.process.sidecar_process import sidecar, until, write_checkpoint
from tests.process.test_uploads import FILES, big


def test_the_second_waits_for_the_first_says_so_and_then_goes_on(tmp_path: Path) -> None:
    store = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", store | {"CKPT_BANDWIDTH_LIMIT": "2MB/s", "CKPT_GRACE_SECONDS": "20"}) as old:
        old.ready()
        write_checkpoint(old.volume, "checkpoint-1", {"model": big(6_000_000)}, {})
        until(lambda: old.events("checkpoint_uploading"))
        token = (old.volume / ".ckpt/token").read_bytes()
        old.process.send_signal(signal.SIGTERM)
        until(lambda: (old.volume / ".ckpt/terminating").exists())
        with sidecar(tmp_path / "volume", store | {"CKPT_RESUME": "on-demand"}) as new:
            new.up()
            answer = new.call("GET", "/readyz")
            assert answer["http_status"] == 503
            assert "another sidecar still uses this volume" in answer["detail"]
            flushed = new.call("POST", "/v1/flush", {"timeout_s": 0.3})
            assert flushed["http_status"] == 504, "what it has not looked at may not be durable"
            assert (old.volume / ".ckpt/token").read_bytes() == token
            assert old.wait() == 0, old.log()
            assert old.report["durable"] == ["checkpoint-1"]
            new.ready()
            until(lambda: new.status()["phase"] == "running", what="the notice was for the old one")
            assert new.command("status").returncode == 0
            assert (new.volume / ".ckpt/api.sock").is_socket()
            write_checkpoint(new.volume, "checkpoint-2", FILES, {})
            new.committed("checkpoint-2")
            assert new.terminate() == 0
        assert [event["checkpoint"] for event in new.events("checkpoint_uploading")] == ["checkpoint-2"]


def test_the_lock_is_free_when_its_holder_was_killed(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", settings) as first:
        first.ready()
        first.kill()
    with sidecar(tmp_path / "volume", settings) as second:
        second.ready()
        assert second.events("volume_waited_for") == []


def test_one_that_waits_ends_by_its_deadline_and_touches_nothing(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_GRACE_SECONDS": "2"}
    with sidecar(tmp_path / "volume", settings) as first:
        first.ready()
        with sidecar(tmp_path / "volume", settings) as second:
            second.up()
            began_s = time.monotonic()
            second.terminate()
            assert time.monotonic() - began_s < 3
        assert (first.volume / ".ckpt/api.sock").is_socket()
        assert not (first.volume / ".ckpt/exit-report.json").exists()
        assert first.call("GET", "/healthz")["http_status"] == 200
