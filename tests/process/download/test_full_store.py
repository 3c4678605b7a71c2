"""A pod that starts while the store takes no byte: its training resumes, and what it saves is sent once there is space."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import mounts, servers
from tests.process.conftest import S3Server
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint

FILES = {"model.safetensors": b"m" * 300_000, "rng/state.pth": b"1"}


class Full:
    """Answers writes as a store without space does, while ``is_full``."""

    def __init__(self) -> None:
        self.is_full = False

    def __call__(self, request: servers.Request) -> servers.ProxyAnswer | None:
        is_refused = self.is_full and request.method in ("PUT", "POST")
        return servers.s3_error(403, "QuotaExceeded") if is_refused else None


@contextmanager
def full_store(server: S3Server, prefix: str) -> Iterator[tuple[dict[str, str], Full]]:
    full = Full()
    with servers.Proxy(server.endpoint, full).running() as endpoint:
        yield server.settings(prefix=prefix) | {"AWS_S3_ENDPOINT": endpoint}, full


def commit_one(volume: Path, settings: dict[str, str]) -> None:
    with sidecar(volume, settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", FILES)
        running.committed("checkpoint-10")
        assert running.terminate() == 0


def resumed(running: Sidecar) -> None:
    answer = running.up().resume()
    assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-10"), running.log()
    assert any(event["source"] == "store" for event in running.events("resume_ready")), "it may be before anybody asks"
    assert contents(running.volume / "checkpoint-10") == FILES
    assert "set CKPT_KEEP_STORE" in until(lambda: running.status()["degraded_reason"])
    assert len(running.events("store_is_full")) == 1
    assert "full" in running.status()["safety"]["headline"]


def test_a_training_resumes_from_a_full_bucket(moto_server: S3Server, tmp_path: Path) -> None:
    with full_store(moto_server, "full-at-a-resume") as (settings, full):
        commit_one(tmp_path / "old-volume", settings)
        full.is_full = True
        with sidecar(tmp_path / "volume", settings) as running:
            resumed(running)
            write_checkpoint(running.volume, "checkpoint-20", FILES)
            full.is_full = False
            running.committed("checkpoint-20")


@pytest.mark.slow
def test_a_full_bucket_that_another_run_may_hold_is_resumed_from_later(moto_server: S3Server, tmp_path: Path) -> None:
    """Nobody can be asked for a sign of life there."""
    with full_store(moto_server, "full-and-held") as (settings, full):
        unnamed = settings | {"JOB_NAME": ""}
        with sidecar(tmp_path / "old-volume", unnamed) as first:
            write_checkpoint(first.ready().volume, "checkpoint-10", FILES)
            first.committed("checkpoint-10")
            first.kill()
        full.is_full = True
        with sidecar(tmp_path / "volume", unnamed) as running:
            until(lambda: running.events("store_is_full"))
            asked = running.call("POST", "/v1/resume", {"checkpoint": "latest"})
            until(lambda: running.call("GET", f"/v1/resume/{asked['id']}")["detail"])
            assert not (running.volume / "checkpoint-10").exists()
            full.is_full = False
            assert running.answer(asked["id"])["checkpoint"] == "checkpoint-10"


def test_a_full_bucket_of_another_run_is_not_resumed_from(moto_server: S3Server, tmp_path: Path) -> None:
    with full_store(moto_server, "full-of-another") as (settings, full):
        commit_one(tmp_path / "old-volume", settings | {"CKPT_RUN_ID": "one"})
        full.is_full = True
        with sidecar(tmp_path / "volume", settings | {"CKPT_RUN_ID": "another"}) as running:
            assert running.wait() == 2
            assert "belongs to run 'one'" in running.log()
            assert not (running.volume / "checkpoint-10").exists()


def test_a_training_resumes_from_a_full_volume_of_a_folder_store(tmp_path: Path) -> None:
    with mounts.small_volume(tmp_path / "store", "24m") as store:
        settings = {"CKPT_STORE": f"file://{store}/run"}
        commit_one(tmp_path / "old-volume", settings)
        filler = store / "filler"
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(100 << 20))
        for number in range(100):  # small files may take the pages that the large one left
            with pytest.raises(OSError, match="No space"):
                (store / f"filler-{number}").write_bytes(bytes(4096))
        with sidecar(tmp_path / "volume", settings) as running:
            resumed(running)
            os.truncate(filler, 0)
            write_checkpoint(running.volume, "checkpoint-20", FILES)
            running.committed("checkpoint-20")
