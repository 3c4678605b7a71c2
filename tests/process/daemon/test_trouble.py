"""What people see when something is wrong, and that nothing is lost by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.lifecycle.termination import Termination
from sidecar.volume.volume import Volume
from tests import mounts, servers
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import sidecar, until, write_checkpoint
from tests.process.upload.test_uploads import FILES, big


def refused(volume: Path, settings: dict[str, str]) -> str:
    """Start a sidecar that must not start. Returns its one line of explanation."""
    with sidecar(volume, settings) as running:
        assert running.wait() == 2, running.log()
        lines = [line for line in running.log().splitlines() if not line.startswith("{")]
        assert len(lines) == 1, running.log()
        return lines[0]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CKPT_STROE", "file:///x", "did you mean CKPT_STORE?"),
        ("CKPT_CONCURRENCY", "many", "CKPT_CONCURRENCY='many'"),
        ("CKPT_GRACE_SECONDS", "-1", "CKPT_GRACE_SECONDS='-1'"),
        ("CKPT_BANDWIDTH_LIMIT", "fast", "an amount such as"),
        ("CKPT_MODE", "other", "'native' or 'classic'"),
        ("CKPT_STORE", "ftp://x", "s3://bucket/prefix or file:///path"),
        ("CKPT_STORE", "s3://A/x", "bucket"),
        ("CKPT_NODE_COUNT", "two", "CKPT_NODE_COUNT"),
        ("CKPT_DIR", "relative", "absolute"),
    ],
)
def test_a_wrong_setting_stops_the_start_with_one_line_that_names_it(name: str, value: str, said: str, tmp_path: Path) -> None:
    line = refused(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}", name: value})
    assert said in line
    assert name.removesuffix("E")[:8] in line


def test_a_store_is_required(tmp_path: Path) -> None:
    assert "CKPT_STORE is not set" in refused(tmp_path / "volume", {})


def test_a_missing_bucket_is_named(moto_server, tmp_path: Path) -> None:
    settings = moto_server.settings(prefix="run") | {"CKPT_STORE": "s3://no-such-bucket/run"}
    line = refused(tmp_path / "volume", settings)
    assert "no-such-bucket" in line
    assert "create it" in line


@pytest.mark.parametrize(
    ("name", "said"), [("AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID"), ("AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY")]
)
def test_wrong_credentials_are_named_and_never_printed(name: str, said: str, real_server, tmp_path: Path) -> None:
    line = refused(tmp_path / "volume", real_server.settings(prefix="run") | {name: "wrong-and-secret"})
    assert said in line
    assert "wrong-and-secret" not in line


def test_a_prefix_of_another_run_is_refused(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings | {"CKPT_RUN_ID": "llama-7b"}) as running:
        running.ready()
    line = refused(tmp_path / "volume-2", place.settings | {"CKPT_RUN_ID": "other"})
    assert "llama-7b" in line
    assert "CKPT_STORE" in line
    with sidecar(tmp_path / "volume-3", place.settings | {"CKPT_RUN_ID": "llama-7b"}) as running:
        running.ready()


@pytest.mark.slow
def test_a_store_that_is_not_there_yet_is_waited_for_without_hurting_the_trainer(moto_process, tmp_path: Path) -> None:
    settings = moto_process.settings(prefix="run")
    moto_process.stop()
    with sidecar(tmp_path / "volume", settings) as running:
        running.up()
        write_checkpoint(running.volume, "checkpoint-1", FILES)
        until(lambda: running.status()["degraded"])
        ready = running.call("GET", "/readyz")
        assert (ready["http_status"], ready["detail"].count("tried again")) == (503, 1)
        assert running.call("GET", "/healthz")["http_status"] == 200
        moto_process.start()
        running.committed("checkpoint-1", timeout_s=60)
        assert not running.status()["degraded"]


@pytest.mark.slow
def test_a_store_that_goes_away_in_mid_upload_is_tried_again_until_it_is_back(moto_process, tmp_path: Path) -> None:
    settings = moto_process.settings(prefix="run") | {"CKPT_BANDWIDTH_LIMIT": "10MB/s", "CKPT_PART_SIZE": "5Mi"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"model": big(20_000_000)})
        until(lambda: running.events("checkpoint_uploading"))
        moto_process.pause()
        time.sleep(1)
        moto_process.stop()
        until(lambda: running.status()["degraded"])
        assert running.events("store_degraded")[0]["hint"].startswith("training goes on")
        moto_process.start()  # with an empty memory: its unfinished uploads are gone, too
        running.committed("checkpoint-1", timeout_s=60)
        assert running.status()["retries"] > 0


@pytest.mark.slow
def test_a_store_that_comes_back_within_the_grace_period_is_not_missed(moto_process, tmp_path: Path) -> None:
    settings = moto_process.settings(prefix="run") | {"CKPT_GRACE_SECONDS": "20"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        moto_process.stop()
        write_checkpoint(running.volume, "checkpoint-1", FILES, {})
        until(lambda: running.events("store_degraded"))
        time.sleep(6)  # by now the store is asked after ever longer pauses
        running.process.send_signal(signal.SIGTERM)
        moto_process.start()
        assert running.wait() == 0
        assert running.report["durable"] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("status", "code"), [(403, "QuotaExceeded"), (400, "XMinioAdminBucketQuotaExceeded"), (507, "XMinioStorageFull")]
)
def test_a_full_store_ends_no_start_and_is_used_once_it_has_space(status: int, code: str, moto_server, tmp_path: Path) -> None:
    settings, is_full = moto_server.settings(prefix=f"full-{code}"), True

    def rule(request: servers.Request) -> servers.ProxyAnswer | None:
        return servers.s3_error(status, code) if is_full and request.method == "PUT" else None

    with (
        servers.Proxy(moto_server.endpoint, rule).running() as endpoint,
        sidecar(tmp_path / "volume", settings | {"AWS_S3_ENDPOINT": endpoint}) as running,
    ):
        running.up()
        write_checkpoint(running.volume, "checkpoint-1", FILES)
        why = until(lambda: running.status()["degraded_reason"])
        assert f"{code}: the" in why
        assert "CKPT_KEEP_STORE" in why
        assert running.process.poll() is None
        is_full = False
        running.committed("checkpoint-1")


@ON_ONE_STORE
def test_what_cannot_land_by_the_deadline_is_reported_with_exit_code_3(place: Place, tmp_path: Path) -> None:
    settings = place.settings | {"CKPT_BANDWIDTH_LIMIT": "1MB/s", "CKPT_GRACE_SECONDS": "3"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"model": b"x"})
        running.committed("checkpoint-1")
        write_checkpoint(running.volume, "checkpoint-2", {"model": big(20_000_000)})
        began_s = time.monotonic()
        assert running.terminate() == 3
        assert 2 < time.monotonic() - began_s < 15, "3 s, and all of it needs 20"
        [given_up] = running.report["given_up"]
        assert (given_up["checkpoint"], given_up["step"]) == ("checkpoint-2", 2)
        assert "deadline" in given_up["reason"]
        assert running.report["newest_durable_step"] == 1
        assert running.report["durable"] == ["checkpoint-1"]


@ON_ONE_STORE
def test_a_checkpoint_finished_at_the_instant_of_sigterm_is_not_left_behind(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", FILES)
        assert running.terminate() == 0
        assert running.report["durable"] == ["checkpoint-1"]


@pytest.mark.slow
def test_an_old_notice_does_not_use_up_the_time_of_a_later_sigterm(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_GRACE_SECONDS": "3", "CKPT_BANDWIDTH_LIMIT": "4MB/s"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        assert running.call("POST", "/v1/drain")["http_status"] == 200
        until(lambda: running.events("termination_void"))
        until(lambda: running.status()["phase"] == "running")
        assert not (running.volume / ".ckpt/terminating").exists()
        write_checkpoint(running.volume, "checkpoint-1", {"model": big(4_000_000)}, {})
        assert running.terminate() == 0
        assert running.report["durable"] == ["checkpoint-1"]


@ON_ONE_STORE
def test_a_checkpoint_written_anew_during_its_upload_is_uploaded_as_it_is_now(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings | {"CKPT_BANDWIDTH_LIMIT": "10MB/s"}) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"model": big(12_000_000)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        write_checkpoint(running.volume, "checkpoint-1", {"model": big(12_000_000, 2)}, {"meta": {"second": True}})
        until(lambda: running.events("checkpoint_committed"))
        until(lambda: place.read("checkpoint-1/model") == big(12_000_000, 2))
        assert running.terminate() == 0
        assert running.report["given_up"] == []
    assert json.loads(place.read("checkpoint-1/.complete"))["meta"] == {"second": True}


def test_a_second_sigterm_cuts_the_flush_short(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_BANDWIDTH_LIMIT": "1MB/s", "CKPT_GRACE_SECONDS": "60"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-2", {"model": big(20_000_000)})
        until(lambda: running.events("checkpoint_uploading"))
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.status()["phase"] == "flushing")
        began_s = time.monotonic()
        assert running.terminate() == 3
        assert time.monotonic() - began_s < 10, "all of it needs 20 s"


def test_sigterm_waits_for_a_trainer_that_still_holds_its_lease(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_MODE": "classic"}
    trainer = """
import fcntl, os, sys, time
lease = open(os.environ["CKPT_DIR"] + "/.ckpt/ranks/0.lease", "w")
fcntl.lockf(lease, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
folder = os.environ["CKPT_DIR"] + "/checkpoint-9"
os.mkdir(folder)
open(folder + "/model", "w").write("last breath")
open(folder + "/.complete", "w").write('{"reason": "jit"}')
os._exit(143)
"""
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        child = subprocess.Popen(
            ["python3", "-c", trainer],
            env={**os.environ, "CKPT_DIR": str(running.volume)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout
            assert child.stdin
            assert child.stdout.readline() == "held\n"
            assert running.status()["trainer"]["alive"]
            running.process.send_signal(signal.SIGTERM)
            until(lambda: running.status()["phase"] == "draining")
            time.sleep(0.5)
            assert running.process.poll() is None
            child.stdin.write("go\n")
            child.stdin.flush()
            child.wait()
        assert running.wait() == 0
        assert running.report["durable"] == ["checkpoint-9"]


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_volume(tmp_path / "volume", "24m") as volume:
        yield volume


@pytest.fixture
def small_state(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_volume(tmp_path / "state", "24m") as state:
        yield state


def fill(place: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (place / "filler").write_bytes(bytes(100 << 20))


def test_a_notice_reaches_the_trainer_also_on_a_full_volume(small_volume: Path) -> None:
    volume = Volume(small_volume)
    volume.prepare()
    fill(small_volume)
    Termination(volume, grace_s=30.0).fenced("a later pod of this job has taken the prefix over")
    assert (small_volume / ".ckpt/terminating").read_bytes() == b""  # which is a notice without a source
    assert Termination(volume, grace_s=30.0).poll_notice()


@ON_ONE_STORE
def test_a_full_volume_does_not_keep_what_is_on_it_from_becoming_durable(place: Place, small_volume: Path) -> None:
    write_checkpoint(small_volume, "checkpoint-1", {"model": big(6_000_000)})
    with sidecar(small_volume, place.settings) as running:
        running.ready()
        running.committed("checkpoint-1")
        write_checkpoint(small_volume, "checkpoint-2", {"model": big(6_000_000, 2)})
        fill(small_volume)
        running.committed("checkpoint-2")
        assert running.terminate() == 0


@ON_ONE_STORE
def test_a_sidecar_that_starts_on_a_full_volume_sends_what_is_on_it(
    place: Place, small_volume: Path, small_state: Path
) -> None:
    settings = place.settings | {"CKPT_STATE_DIR": str(small_state), "CKPT_API_TOKEN": "required"}
    with sidecar(small_volume, settings) as running:
        running.ready().kill()
    token = (small_volume / ".ckpt/token").read_text()
    write_checkpoint(small_volume, "checkpoint-1", {"model": big(6_000_000)})
    fill(small_volume)
    fill(small_state)
    with sidecar(small_volume, settings) as running:
        running.committed("checkpoint-1")
        assert running.events("token_not_written")
        (small_volume / "filler").unlink()
        until(lambda: (small_volume / ".ckpt/token").read_text() != token)
        anew = (small_volume / ".ckpt/token").read_text()
        assert running.call("POST", "/v1/flush", {"timeout_s": 10}, token=anew)["http_status"] == 200
        assert running.terminate() == 0


@ON_ONE_STORE
def test_a_download_that_does_not_fit_says_so_and_succeeds_once_there_is_space(
    place: Place, small_volume: Path, tmp_path: Path
) -> None:
    with sidecar(tmp_path / "old-volume", place.settings) as old:
        old.ready()
        write_checkpoint(old.volume, "checkpoint-1", {"model": big(16_000_000)})
        old.committed("checkpoint-1")
    (small_volume / "filler").write_bytes(bytes(16 << 20))
    with sidecar(small_volume, place.settings) as running:
        answer = running.up().resume()
        assert answer["state"] == "failed"
        assert "No space left" in answer["detail"]
        (small_volume / "filler").unlink()
        assert running.resume()["checkpoint"] == "checkpoint-1"
        assert (small_volume / "checkpoint-1/model").read_bytes() == big(16_000_000)


def test_the_volume_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_DIR": str(tmp_path / "file")})
    assert "CKPT_DIR" in line


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.up()
        line = refused(tmp_path / "volume-2", settings | {"CKPT_API_PORT": str(running.port)})
        assert "CKPT_API_PORT" in line


@pytest.mark.slow
def test_a_sidecar_killed_at_random_moments_commits_everything_once_and_unchanged(place: Place, tmp_path: Path) -> None:
    volume, files = tmp_path / "volume", {"model": big(11_000_000), "small": b"s"}
    settings = place.settings | {"CKPT_PART_SIZE": "5Mi", "CKPT_KEEP_LOCAL": "9"}
    write_checkpoint(volume, "checkpoint-1", files)
    for delay_s in (0.45, 0.55, 0.65, 0.8, 1.0):
        with sidecar(volume, settings) as running:
            time.sleep(delay_s)
            running.kill()
    with sidecar(volume, settings) as running:
        running.committed("checkpoint-1")
        assert running.terminate() == 0
    assert {path: place.read(f"checkpoint-1/{path}") for path in files} == files
    assert place.unfinished_uploads() == []
    commit = json.loads(place.read("checkpoint-1/.complete"))
    assert commit["files"] == 2


@pytest.mark.slow
def test_a_store_that_goes_away_at_once_ends_no_sidecar(moto_process, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", moto_process.settings(prefix="run")) as running:
        until(lambda: running.events("store_opened"))
        moto_process.stop()
        until(lambda: running.events("no_heartbeat") or running.events("store_degraded"))
        assert running.process.poll() is None
        moto_process.start()  # with an empty memory: nobody has removed run.json but the outage
        write_checkpoint(running.volume, "checkpoint-1", FILES, {})
        running.committed("checkpoint-1")
        assert running.terminate() == 0
