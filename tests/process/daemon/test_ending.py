"""How a life of the sidecar ends, whatever hangs, fails or is still asked of it, and what it does not take for an end."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.lifecycle.phases import margin_s
from sidecar.daemon import exit_report, termination_message
from sidecar.lifecycle.termination import Termination
from sidecar.volume.opener import Place
from sidecar.volume.volume import Volume
from tests.lifecycle.beginning import begin
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint
from tests.processes import of_process
from trainer_hook.contract import rfc3339

BUSY_S = 6.0
"""What a machine that runs other tests may take longer; what hangs here would hang for many times that."""


def file_store(tmp_path: Path) -> dict[str, str]:
    return {"CKPT_STORE": f"file://{tmp_path / 'store'}"}


def slow_volume(tmp_path: Path, call: str, seconds: float) -> dict[str, str]:
    """Return settings under which ``os.<call>`` below ``.ckpt/pins`` takes this long."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import os, time\nreal = os.{call}\n"
        "def place(of): return os.readlink(f'/proc/self/fd/{of}') if isinstance(of, int) else str(of)\n"
        f"def slow(*a, **k):\n    if any('/pins/' in place(x) for x in (*a, k.get('dst_dir_fd', ''))): time.sleep({seconds})\n"
        f"    return real(*a, **k)\nos.{call} = slow\n"
    )
    return {"PYTHONPATH": f"{site}:{Path.cwd()}"}


@contextmanager
def flushing(running: Sidecar, *, timeout_s: float) -> Iterator[list[Any]]:
    """Ask for a flush meanwhile; the list has the answer afterwards."""
    answers: list[Any] = []

    def ask() -> None:
        answers.append(running.call("POST", "/v1/flush", {"timeout_s": timeout_s}, timeout_s=timeout_s + 10))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    yield answers
    asking.join()


def hears_sigterm(running: Sidecar) -> bool:
    """Whether the process would notice SIGTERM also as PID 1 of a container: it handles it, or lets it wait."""
    status = of_process(running.process.pid, "status").decode()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk:", "SigCgt:"))]
    return any(mask & 1 << (signal.SIGTERM - 1) for mask in masks)


def ended_after_s(running: Sidecar) -> tuple[int, float]:
    began_s = time.monotonic()
    return running.terminate(timeout_s=60), time.monotonic() - began_s


@pytest.mark.slow
def test_a_volume_that_hangs_does_not_hold_the_exit_past_the_deadline(tmp_path: Path) -> None:
    settings = file_store(tmp_path) | {"CKPT_GRACE_SECONDS": "3"} | slow_volume(tmp_path, "link", 20)
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"x"}, {})
        time.sleep(0.7)
        code, took_s = ended_after_s(running)
        assert took_s < 3 + BUSY_S
        assert code == 3
        assert "still being examined" in running.report["unseen"]


def test_nor_past_a_second_sigterm(tmp_path: Path) -> None:
    settings = file_store(tmp_path) | {"CKPT_GRACE_SECONDS": "60"} | slow_volume(tmp_path, "link", 20)
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"x"}, {})
        time.sleep(0.7)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        code, took_s = ended_after_s(running)
        assert took_s < BUSY_S
        assert code == 3


def test_open_calls_are_answered_before_the_deadline_and_hold_nothing(tmp_path: Path) -> None:
    settings = file_store(tmp_path) | {"CKPT_GRACE_SECONDS": "3", "CKPT_BANDWIDTH_LIMIT": "1"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"x" * 100, "b": b"x" * 100}, {})
        until(lambda: running.events("checkpoint_uploading"))
        stream = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        stream.request("GET", "/v1/events")
        told = stream.getresponse()
        with flushing(running, timeout_s=100) as answers:
            code, took_s = ended_after_s(running)
        assert took_s < 3 + BUSY_S
        assert code == 3
        assert b"checkpoint_given_up" in told.read()
        stream.close()
        # What was given up is not pending any more, and it is not durable either.
        assert answers[0]["http_status"] == 504
        assert [(m["checkpoint"], m["state"]) for m in answers[0]["missing"]] == [("checkpoint-1", "given-up")]


@pytest.mark.slow
def test_in_the_first_moments_nobody_says_that_all_is_durable(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, file_store(tmp_path) | {"CKPT_BANDWIDTH_LIMIT": "1"}) as running:
        running.ready()
        folder = write_checkpoint(volume, "checkpoint-20", {"a": b"0" * 500, "model": b"A" * 100}, {})
        until(lambda: running.events("checkpoint_uploading"))
        running.kill()
    shutil.rmtree(folder)  # rotated: what is held is the only copy
    with sidecar(volume, file_store(tmp_path) | slow_volume(tmp_path, "scandir", 2)) as running:
        running.up()
        problem = running.call("POST", "/v1/flush", {"timeout_s": 0.3})
        assert problem["http_status"] == 504
        assert problem["missing"]
        assert running.terminate() == 0
        assert running.report["durable"] == ["checkpoint-20"]


def test_a_volume_that_is_away_ends_nothing_and_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    volume, away = tmp_path / "volume", tmp_path / "away"
    with sidecar(volume, file_store(tmp_path) | {"CKPT_MODE": "classic", "CKPT_GRACE_SECONDS": "2"}) as running:
        running.ready()
        volume.rename(away)
        time.sleep(1.5)
        assert running.status()["volume"] == {"free_bytes": None, "total_bytes": None}
        problem = running.call("POST", "/v1/flush", {"timeout_s": 0.3})
        assert "cannot be read" in problem["missing"][0]["reason"]
        away.rename(volume)
        write_checkpoint(volume, "checkpoint-1", {"a": b"x"}, {})
        running.committed("checkpoint-1")
        assert running.call("POST", "/v1/flush", {"timeout_s": 5})["durable"] == ["checkpoint-1"]
        volume.rename(away)
        assert running.terminate() == 3
    [reported] = running.events("exit_report")
    assert "cannot be read" in reported["unseen"]


def tell(volume: Path, state: str, at_s: float) -> None:
    (volume / ".ckpt").mkdir(parents=True, exist_ok=True)
    (volume / ".ckpt/trainer.json").write_text(json.dumps({"state": state, "step": 5, "updated_at": rfc3339(at_s)}))


def test_a_classic_sidecar_does_not_end_by_the_success_of_an_earlier_run(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    tell(volume, "succeeded", time.time() - 3600)
    with sidecar(volume, file_store(tmp_path) | {"CKPT_MODE": "classic"}) as running:
        running.ready()
        time.sleep(1)
        assert running.process.poll() is None
        write_checkpoint(volume, "checkpoint-1", {"a": b"x"}, {})
        running.committed("checkpoint-1")
        tell(volume, "succeeded", time.time())
        assert running.wait() == 0
    with sidecar(volume, file_store(tmp_path) | {"CKPT_MODE": "classic"}) as running:  # another run in the same place
        running.ready()
        time.sleep(1)
        assert running.process.poll() is None


def test_a_classic_sidecar_that_was_killed_after_the_success_of_its_trainer_still_ends(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    settings = file_store(tmp_path) | {"CKPT_MODE": "classic"}
    with sidecar(volume, settings | {"CKPT_BANDWIDTH_LIMIT": "1"}) as running:
        running.ready()
        write_checkpoint(volume, "checkpoint-1", {"a": b"x" * 500, "b": b"x"}, {})
        tell(volume, "succeeded", time.time())
        until(lambda: running.events("checkpoint_uploading"))
        running.kill()
    with sidecar(volume, settings) as running:
        assert running.wait() == 0
        assert running.report["durable"] == ["checkpoint-1"]


def test_sigterm_counts_although_the_notice_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ckpt").mkdir()
    termination = Termination(Volume(tmp_path), grace_s=1.0)
    termination.notice("prestop", at_s=time.time() - 10)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Place, "remove", read_only)
    termination.sigterm()
    assert termination.sigterms == 1
    left_s = termination.deadline.left_s()
    assert left_s is not None
    assert left_s > 0


def test_a_stale_notice_that_cannot_be_removed_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    (tmp_path / ".ckpt/terminating").write_text(json.dumps({"at": "2026-01-01T00:00:00Z", "source": "sigterm"}))

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Place, "remove", read_only)
    monkeypatch.setattr(os, "rename", read_only)
    _, termination = begin(volume, grace_s=1.0)
    assert not termination.poll_notice()


def test_a_finished_checkpoint_that_its_trainer_destroyed_before_it_was_durable_is_reported_as_lost(tmp_path: Path) -> None:
    settings = file_store(tmp_path) | {"CKPT_BANDWIDTH_LIMIT": "1"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        folder = write_checkpoint(running.volume, "checkpoint-1", {"model": b"x" * 500_000, "state": b"x" * 500_000}, {})
        until(lambda: running.events("checkpoint_uploading"))
        (folder / ".complete").unlink()
        for name in ("model", "state"):  # in place, and the trainer dies in the middle of it
            (folder / name).write_bytes(b"begun")
        running.call("POST", "/v1/bandwidth", {"limit": None})
        until(lambda: running.events("checkpoint_lost"), timeout_s=30.0)
        assert running.terminate() == 3
        assert [given_up["checkpoint"] for given_up in running.report["given_up"]] == ["checkpoint-1"]


@pytest.mark.parametrize(("pod", "left_s"), [("pod-a", 40.0), ("pod-b", None)])
def test_a_notice_counts_for_the_pod_that_got_it_and_not_for_the_next_one_on_the_volume(
    pod: str, left_s: float | None, tmp_path: Path
) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    begin(volume, "pod-a", grace_s=60.0)
    told = {"at": rfc3339(time.time() - 20.0), "source": "sigterm"}
    (tmp_path / ".ckpt/terminating").write_text(json.dumps(told))
    _, termination = begin(volume, pod, grace_s=60.0)
    assert termination.poll_notice() is (left_s is not None)
    assert (tmp_path / ".ckpt/terminating").exists() is (left_s is not None)
    termination.sigterm()
    assert termination.deadline.left_s() == pytest.approx((left_s or 60.0) - margin_s(60.0), abs=5.0)


@pytest.mark.parametrize("pod", [{}, {"POD_UID": "one"}], ids=["machine", "pod"])
def test_a_sidecar_that_is_started_again_after_its_end_is_not_terminating(pod: dict[str, str], tmp_path: Path) -> None:
    settings = file_store(tmp_path) | pod | {"CKPT_GRACE_SECONDS": "100", "CKPT_MODE": "classic"}
    for step in (1, 2):
        with sidecar(tmp_path / "volume", settings) as running:
            running.ready()
            until(lambda: running.call("GET", "/v1/status")["phase"] != "starting")
            assert running.call("GET", "/v1/status")["phase"] == "running"
            write_checkpoint(running.volume, f"checkpoint-{step}", {"a": b"x"}, {})
            running.committed(f"checkpoint-{step}")
            assert running.terminate() == 0
            assert (running.volume / ".ckpt/terminating").exists()


def test_a_second_sidecar_on_the_volume_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, file_store(tmp_path)) as first:
        first.ready()
        token = (volume / ".ckpt/token").read_text()
        with sidecar(volume, file_store(tmp_path)) as second:
            until(lambda: second.events("volume_in_use"))
            assert (volume / ".ckpt/token").read_text() == token
            write_checkpoint(volume, "checkpoint-1", {"a": b"x"}, {})
            first.committed("checkpoint-1")
            assert not second.events("sidecar_started")
            assert first.terminate() == 0
            second.ready()
            assert (volume / ".ckpt/token").read_text() != token


def test_a_sidecar_that_waits_for_the_volume_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", file_store(tmp_path)) as first:
        first.ready()
        with sidecar(tmp_path / "volume", file_store(tmp_path)) as second:
            until(lambda: second.events("volume_in_use"))
            assert second.terminate() == 0
        assert not (first.volume / ".ckpt/terminating").exists()
        assert first.terminate() == 0


def test_a_sidecar_that_never_had_the_volume_does_not_say_that_what_is_finished_there_is_durable(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", file_store(tmp_path) | {"CKPT_BANDWIDTH_LIMIT": "1"}) as first:
        first.ready()
        with sidecar(tmp_path / "volume", file_store(tmp_path)) as second:
            until(lambda: second.events("volume_in_use"))
            write_checkpoint(first.volume, "checkpoint-1", {"a": b"x" * 100, "b": b"x" * 100}, {})
            assert second.terminate() == 3
            assert "checkpoint-1" in second.events("ended_without_the_volume")[0]["reason"]
        assert not (first.volume / ".ckpt/exit-report.json").exists()


def test_a_sidecar_that_is_told_to_end_while_it_starts_still_flushes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "volume", "checkpoint-20", {"model": b"weights"}, {})
    with sidecar(tmp_path / "volume", file_store(tmp_path)) as running:
        until(lambda: hears_sigterm(running))
        assert not running.events(), "it had started already"
        assert running.terminate() == 0
        assert running.report["durable"] == ["checkpoint-20"]


def test_nobody_is_told_that_all_is_durable_while_the_newest_was_rejected(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", file_store(tmp_path)) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-5", {"a\tb": b"x"}, {})
        # Its script takes local time for UTC, so it says that it was finished hours from now.
        write_checkpoint(running.volume, "checkpoint-10", {"a": b"x"}, {"created_at": rfc3339(time.time() + 9 * 3600)})
        running.committed("checkpoint-10")
        assert running.call("POST", "/v1/flush", {})["durable"] == ["checkpoint-10"], "what was overtaken does not count"
        write_checkpoint(running.volume, "checkpoint-20", {"a\tb": b"x"}, {})
        problem = running.call("POST", "/v1/flush", {})
        assert [(m["checkpoint"], m["state"]) for m in problem["missing"]] == [("checkpoint-20", "rejected")]
        assert running.command("flush").returncode == 3
        assert running.terminate() == 3
        assert list(running.report["newest_rejected"]) == ["checkpoint-20"]
        [told] = running.events("exit_report")
        assert (told["level"], told["newest_rejected"]) == ("error", running.report["newest_rejected"])
        assert "a\\tb" in told["newest_rejected"]["checkpoint-20"]


def test_a_classic_sidecar_whose_trainer_succeeded_ends_although_the_final_model_was_rejected(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", file_store(tmp_path) | {"CKPT_MODE": "classic"}) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"a": b"x"}, {})
        running.committed("checkpoint-10")
        write_checkpoint(running.volume, "final", {"model": b"x", "a\tb": b"x"}, {})
        tell(running.volume, "succeeded", time.time())
        assert running.wait() == 3
        assert list(running.report["newest_rejected"]) == ["final"]


@pytest.mark.parametrize(("with_marker", "deleted"), [(False, False), (True, False), (True, True)])
def test_a_pod_in_which_nothing_was_saved_says_so(tmp_path: Path, with_marker: bool, deleted: bool) -> None:
    with sidecar(tmp_path / "volume", file_store(tmp_path)) as running:
        running.ready()
        (running.volume / "ignite_checkpoint_10.pt").write_bytes(b"of a library that the hook does not know")
        if with_marker:
            write_checkpoint(running.volume, "checkpoint-10", {"a": b"x"}, {})
            running.committed("checkpoint-10")
            if deleted:  # by the script, which needs no hook
                shutil.rmtree(running.volume / "checkpoint-10")
                until(lambda: not running.call("GET", "/v1/checkpoints?where=local")["checkpoints"])
        assert running.terminate() == 0
        assert running.report["nothing_saved"] is not with_marker
        assert [event["level"] for event in running.events("nothing_was_saved")] == ([] if with_marker else ["warning"])


def test_the_termination_message_names_the_rejected_one_and_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume, message = Volume(tmp_path), tmp_path / "termination-log"
    volume.prepare()
    message.touch()
    monkeypatch.setattr(termination_message, "FILE", message)
    catalog = Catalog(Events())
    catalog.rejected("checkpoint-20", "1-1-1", "'a\\tb' has a control character", marked_at_s=1.0)
    written = exit_report.exit_report(catalog, Termination(volume, grace_s=1.0), bad={}, unfinished={}, had_hook=True)
    exit_report.write(volume, written)
    assert "not in the store: checkpoint-20 ('a\\tb' has a control character)" in message.read_text()
