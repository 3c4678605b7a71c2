"""Notices of several sources, and which of them counts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sidecar.core.lifecycle.phases import margin_s
from sidecar.lifecycle.pod import LAST_REPORT
from sidecar.volume.volume import Volume
from tests.lifecycle.beginning import begin
from trainer_hook.contract import TERMINATING, Notice, encode_notice, rfc3339

GRACE_S = 60.0


def _hook_says(volume: Volume, *, before_s: float) -> None:
    (volume / TERMINATING).publish(encode_notice(Notice(rfc3339(time.time() - before_s), "sigterm")))


@pytest.mark.parametrize("told", ["sigterm", "prestop"])
def test_the_hooks_notice_counts_although_it_is_seen_after_another_one(told: str, tmp_path: Path) -> None:
    """A sidecar without CPU time got both at once; its flush was planned beyond SIGKILL, without a report."""
    volume = Volume(tmp_path)
    volume.prepare()
    _, termination = begin(volume, grace_s=GRACE_S)
    _hook_says(volume, before_s=20.0)
    if told == "sigterm":
        termination.sigterm()
    else:
        termination.notice(told)
        assert not termination.poll_notice()
    assert termination.deadline.left_s() == pytest.approx(GRACE_S - 20.0 - margin_s(GRACE_S), abs=5.0)


def test_its_own_notice_on_the_volume_shortens_no_deadline(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    _, termination = begin(volume, grace_s=GRACE_S)
    assert not termination.poll_notice()
    assert termination.notice("spot", ends_in_s=120.0)
    assert (volume / TERMINATING).status()
    assert not termination.poll_notice()
    assert termination.deadline.left_s() == pytest.approx(120.0 - margin_s(GRACE_S), abs=5.0)


def test_an_empty_notice_counts_again_after_one_that_was_void(tmp_path: Path) -> None:
    volume = Volume(tmp_path)
    volume.prepare()
    _, termination = begin(volume, grace_s=0.1)
    for _ in range(2):
        assert not termination.poll_notice()
        (volume / TERMINATING).publish(b"")
        assert termination.poll_notice()
        assert termination.expire()


@pytest.mark.parametrize("is_unique", [False, True], ids=["machine", "pod"])
@pytest.mark.parametrize(
    ("source", "written_after_s", "counts", "stays"),
    [("sigterm", 5, False, False), ("sigterm", -5, True, True), ("fenced", 5, False, True), ("fenced", -5, True, True)],
)
def test_a_notice_is_over_when_the_process_that_got_it_has_ended_in_order(
    source: str, written_after_s: float, counts: bool, stays: bool, is_unique: bool, tmp_path: Path
) -> None:
    volume, at_s = Volume(tmp_path), time.time() - 20.0
    volume.prepare()
    volume.prepare_state()
    begin(volume, "machine", grace_s=60.0, is_unique=is_unique)
    (tmp_path / ".ckpt/terminating").write_text(json.dumps({"at": rfc3339(at_s), "source": source}))
    report = {"exit_code": 3, "written_at": rfc3339(at_s + written_after_s)}
    (volume.state / LAST_REPORT).publish(json.dumps(report).encode())
    _, termination = begin(volume, "machine", grace_s=60.0, is_unique=is_unique)
    assert termination.poll_notice() is counts
    assert (tmp_path / ".ckpt/terminating").exists() is stays, "the trainer is told of a fencing until it has stopped"
