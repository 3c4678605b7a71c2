"""The time that is left is spent on the newest step that can still be durable; what cannot is named, with the reason."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.lifecycle.termination import Termination
from sidecar.volume import opener
from sidecar.volume.volume import Volume
from tests.lifecycle.beginning import begin
from tests.process.conftest import Place
from tests.process.sidecar_process import sidecar, until, write_checkpoint
from trainer_hook.contract import Notice, encode_notice, rfc3339

MB = 1_000_000
JIT = {"reason": "jit"}
HOLD_LEASE = (
    "import sys, time, pathlib; from trainer_hook.volume import lease; "
    "lease.hold(pathlib.Path(sys.argv[1]), 0); print('held', flush=True); time.sleep(60)"
)


def settings(tmp_path: Path, *, grace_s: float, limit: str) -> dict[str, str]:
    return {
        "CKPT_STORE": f"file://{tmp_path / 'store'}",
        "CKPT_GRACE_SECONDS": str(grace_s),
        "CKPT_BANDWIDTH_LIMIT": limit,
    }


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A training process: nothing but its lease."""
    (tmp_path / "volume/.ckpt/ranks").mkdir(parents=True)
    command = [sys.executable, "-c", HOLD_LEASE, str(tmp_path / "volume")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_where_the_newest_cannot_fit_the_older_one_under_way_is_finished(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=4, limit="4MB/s")) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(12 * MB)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        time.sleep(1)
        write_checkpoint(running.volume, "checkpoint-20", {"model": bytes(60 * MB)}, JIT)
        until(lambda: any(e["checkpoint"] == "checkpoint-20" for e in running.events("checkpoint_finished")))
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.events("flush_planned"))
        status = running.status()
        assert [(p["checkpoint"], p["verdict"]) for p in status["flush"]] == [
            ("checkpoint-10", "fits"),
            ("checkpoint-20", "no-time"),
        ]
        assert "MB are left" in status["flush"][1]["reason"]
        assert running.command("status").stdout.count("checkpoint-20") >= 1
        assert running.wait() == 3
        assert running.report["durable"] == ["checkpoint-10"]
        [given_up] = running.report["given_up"]
        assert given_up["checkpoint"] == "checkpoint-20"
        assert "the deadline passed first" in given_up["reason"]
        assert "MB are left" in given_up["reason"]


@pytest.mark.slow
def test_what_is_under_way_of_an_older_one_is_held_so_that_the_newest_lands(tmp_path: Path) -> None:
    # Two large parts of the older one are in flight; shared with them the link would be too slow for the newer one.
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=8, limit="5MB/s")) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(100 * MB)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        time.sleep(0.6)
        write_checkpoint(running.volume, "checkpoint-20", {"model": bytes(22 * MB)}, JIT)
        assert running.terminate() == 3
        assert running.report["durable"] == ["checkpoint-20"]
        assert [entry["checkpoint"] for entry in running.report["given_up"]] == ["checkpoint-10"]


@pytest.mark.slow
def test_what_was_held_goes_on_in_the_middle_of_its_requests_and_is_not_sent_twice(place: Place, tmp_path: Path) -> None:
    limit = {"CKPT_GRACE_SECONDS": "60", "CKPT_BANDWIDTH_LIMIT": "20MB/s"}
    older, newer = os.urandom(60 * MB), os.urandom(20 * MB)
    with sidecar(tmp_path / "volume", place.settings | limit) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": older}, {})
        until(lambda: running.events("checkpoint_uploading"))
        time.sleep(0.3)
        write_checkpoint(running.volume, "checkpoint-20", {"model": newer}, JIT)
        assert running.terminate() == 0
        committed = running.events("checkpoint_committed")
        assert [(e["checkpoint"], e["retries"]) for e in committed] == [("checkpoint-20", 0), ("checkpoint-10", 0)]
        assert not running.events("store_degraded")
    assert place.read("checkpoint-10/model") == older
    assert place.read("checkpoint-20/model") == newer


@pytest.mark.slow
def test_where_all_places_are_taken_the_newest_is_given_some(tmp_path: Path) -> None:
    more = {"CKPT_CONCURRENCY": "4", "CKPT_PART_SIZE": "16Mi"}
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=10, limit="10MB/s") | more) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {f"model-{n}": bytes(40 * MB) for n in range(4)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        time.sleep(0.5)
        write_checkpoint(running.volume, "checkpoint-20", {"model": bytes(10 * MB)}, JIT)
        assert running.terminate() == 3
        assert running.report["durable"] == ["checkpoint-20"]


def test_with_a_single_request_at_a_time_nothing_waits_for_what_is_held(tmp_path: Path) -> None:
    more = {"CKPT_CONCURRENCY": "1", "CKPT_PART_SIZE": "5Mi"}
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=30, limit="20MB/s") | more) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(30 * MB)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        write_checkpoint(running.volume, "checkpoint-20", {"model": bytes(11 * MB)}, JIT)
        assert running.terminate() == 0
        assert [e["checkpoint"] for e in running.events("checkpoint_committed")] == ["checkpoint-20", "checkpoint-10"]


@pytest.mark.slow
def test_a_notice_that_nothing_follows_lapses_and_the_order_is_the_usual_again(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=2, limit="4MB/s")) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(9 * MB)}, {})
        write_checkpoint(running.volume, "checkpoint-20", {"model": bytes(9 * MB)}, JIT)
        until(lambda: len(running.events("checkpoint_finished")) == 2)
        running.call("POST", "/v1/drain")
        until(lambda: (running.status()["flush"] or [{}])[0].get("verdict") in ("no-time", "may-fit"))
        until(lambda: running.events("termination_void"))
        until(lambda: running.status()["flush"] is None)
        # Training has gone on all the time.
        write_checkpoint(running.volume, "checkpoint-30", {"model": bytes(MB)}, {})
        running.committed("checkpoint-10")
        committed = [e["checkpoint"] for e in running.events("checkpoint_committed")]
        assert committed.index("checkpoint-20") < committed.index("checkpoint-10")
        assert running.status()["phase"] == "running"
        assert running.status()["given_up"] == {}
        assert running.terminate() == 0


def test_a_sidecar_that_is_started_again_in_mid_flush_keeps_the_deadline(tmp_path: Path) -> None:
    given = settings(tmp_path, grace_s=60, limit="1MB/s")
    with sidecar(tmp_path / "volume", given) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(90 * MB)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        running.call("POST", "/v1/drain?source=prestop")
        noticed_s = time.monotonic()
        running.kill()
    with sidecar(tmp_path / "volume", given) as running:
        running.up()
        until(lambda: running.events("termination_noticed"))
        asked_s = time.monotonic()
        told = running.status()["termination"]
        assert told["source"] == "prestop"
        assert told["deadline_in_s"] <= 60 - (asked_s - noticed_s)
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.events("termination_confirmed"))
        assert len(running.events("termination_noticed")) == 1
        assert running.terminate() == 3  # the second one cuts the flush short
        assert "second SIGTERM" in running.report["given_up"][0]["reason"]


def test_what_a_killed_trainer_left_half_written_is_named_and_holds_up_nothing(
    tmp_path: Path, trainer: subprocess.Popen[str]
) -> None:
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=20, limit="20MB/s")) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(20 * MB)}, {})
        running.call("POST", "/v1/drain?source=prestop")
        (running.volume / "checkpoint-20").mkdir()
        (running.volume / "checkpoint-20/model").write_bytes(bytes(20 * MB))
        time.sleep(0.3)
        trainer.kill()
        trainer.wait()
        began_s = time.monotonic()
        assert running.terminate() == 0
        assert time.monotonic() - began_s < 15, "the grace period is 20 s"
        assert running.report["durable"] == ["checkpoint-10"]
        assert running.report["unfinished"] == {"checkpoint-20": "the trainer ended before it was finished"}


def test_sigterm_to_a_native_sidecar_alone_does_not_end_training(tmp_path: Path, trainer: subprocess.Popen[str]) -> None:
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=2, limit="20MB/s")) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(MB)}, {})
        assert running.terminate() == 0
        assert not (running.volume / ".ckpt/terminating").exists()
        assert running.report["durable"] == ["checkpoint-10"]
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=2, limit="20MB/s") | {"CKPT_MODE": "classic"}) as running:
        running.ready()
        running.process.send_signal(signal.SIGTERM)
        until(lambda: (running.volume / ".ckpt/terminating").exists())


def test_a_save_that_will_not_fit_is_said_once_with_what_to_change(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", settings(tmp_path, grace_s=3, limit="4MB/s")) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": bytes(20 * MB)}, {"global_step_seconds": 0.25})
        [said] = until(lambda: running.events("grace_too_short"))
        assert said["predicted_flush_s"] == pytest.approx(5, abs=1)
        assert "CKPT_GRACE_SECONDS" in said["hint"]
        risk = running.status()["at_risk"]
        assert risk["fits_grace"] is False
        assert risk["predicted_save_s"] >= 0.25
        assert risk["predicted_durable_s"] == pytest.approx(risk["predicted_save_s"] + risk["predicted_flush_s"])
        time.sleep(1.5)
        assert len(running.events("grace_too_short")) == 1
        write_checkpoint(running.volume, "checkpoint-20", {"model": os.urandom(MB)}, {})  # saves less
        until(lambda: running.events("grace_is_enough_again"))
        assert running.status()["at_risk"]["advice"] is None


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_moves_no_deadline(jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    _, termination = begin(volume)
    assert not termination.poll_notice()
    (tmp_path / ".ckpt/terminating").write_bytes(encode_notice(Notice(rfc3339(time.time()), "prestop")))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert termination.poll_notice()
    left_s = termination.deadline.left_s()
    assert left_s is not None
    assert 20 < left_s < 29


def test_of_several_notices_the_one_that_ends_first_counts(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    termination = Termination(volume, grace_s=30.0)
    assert termination.notice("spot", ends_in_s=120)
    assert 118 <= (termination.deadline.left_s() or 0) < 120
    termination.sigterm()
    assert 27 < (termination.deadline.left_s() or 0) < 29
    assert termination.current_notice is not None
    assert termination.current_notice.source == "spot"


def test_a_void_notice_that_cannot_be_removed_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    termination = Termination(volume, grace_s=0.5)
    termination.notice("prestop", at_s=time.time() - 10)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(opener.Place, "remove", read_only)
    assert termination.expire()
    assert not termination.poll_notice()
    poll_a_volume_that_fails(termination, monkeypatch)
    assert not termination.poll_notice()


def test_a_volume_that_fails_at_the_notice_moves_no_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    termination = Termination(volume, grace_s=30.0)
    (tmp_path / ".ckpt/terminating").write_bytes(encode_notice(Notice(rfc3339(time.time() - 10), "sigterm")))
    poll_a_volume_that_fails(termination, monkeypatch)
    assert termination.poll_notice()
    assert (termination.deadline.left_s() or 0) < 20


def poll_a_volume_that_fails(termination: Termination, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(opener.Place, "read", failing)
        assert not termination.poll_notice()
