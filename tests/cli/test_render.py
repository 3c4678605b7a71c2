"""Tables: plain and as wide as they are in a pipe, fitted to the width of a terminal."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from sidecar.cli.render import checkpoint_text, status_text, table
from sidecar.cli.render_store import details_text

WHY = "config.json: [bold]12 bytes[/bold], the marker says 13 " + "x" * 100
HEADER, ROWS = ["CHECKPOINT", "STATE", "WHY"], [["checkpoint-20", "rejected", WHY], ["final", "durable", ""]]


def test_a_table_in_a_pipe_is_plain_and_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = table(HEADER, ROWS).splitlines()
    assert lines == [
        "CHECKPOINT     STATE     WHY",
        f"checkpoint-20  rejected  {WHY}",
        "final          durable",
    ]


def test_a_table_in_a_terminal_fits_it_and_shows_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = table(HEADER, ROWS)
    assert "\x1b[1m" in shown
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith("checkpoint-20  rejected  config.json:")
    assert "".join("".join(line[25:] for line in lines[1:-1]).split()) == "".join(WHY.split())


def test_a_table_that_is_too_wide_for_a_terminal_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    header = ["CHECKPOINT", "STATE", "WRITTEN", "NODES", "ATTEMPT"]
    rows = [["checkpoint-40", "committed", "2026-11-24T05:53:26Z", "2", "20261124T055324Z-vm"]]
    assert [line.split() for line in table(header, rows).splitlines()] == [header, *rows]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (4.25, "4.2 s"), (125, "2 min 5 s"), (3600, "1 h"), (9000, "2 h 30 min")]
)
def test_the_status_shows_a_time_as_people_say_it(seconds: float | None, text: str) -> None:
    said = status_text(status(predicted_durable_s=6, predicted_save_s=1, predicted_flush_s=seconds, upload_bytes_per_s=5e6))
    assert f"SIGTERM    costs nothing: durable in 6 s (save 1 s, upload {text} at 5 MB/s)\n" in said


def test_the_status_says_how_safe_training_is_and_what_it_costs_if_it_is_not() -> None:
    now = status(steps_at_risk=67) | {
        "safety": {
            "level": "danger",
            "headline": "The store cannot be used: nothing becomes durable until it answers again",
            "reasons": ["The volume is nearly full"],
            "kill": {"lost": "67 steps", "why": "2 min of training"},
            "sigterm": {"lost": "67 steps", "why": "the store cannot be used"},
        }
    }
    said = status_text(now)
    assert "safety     danger: The store cannot be used: nothing becomes durable until it answers again\n" in said
    assert "           The volume is nearly full\n" in said
    assert "a kill     costs 67 steps: 2 min of training\nSIGTERM    costs 67 steps: the store cannot be used\n" in said


def test_what_a_writer_said_of_a_checkpoint_is_shown_as_json() -> None:
    meta = {"train_call": 0, "is_last": True, "name": "a\x1b[31m"}
    shown = r'{"train_call": 0, "is_last": true, "name": "a\u001b[31m"}'
    assert checkpoint_text({"state": "committed", "meta": meta}) == f"state  committed\nmeta   {shown}"
    assert details_text({"meta": meta, "files": [], "problems": []}) == f"meta  {shown}"


def status(**risk: float | None) -> dict[str, Any]:
    names = ("seconds_at_risk", "steps_at_risk", "predicted_durable_s", "predicted_save_s", "predicted_flush_s", "advice")
    safety = {"level": "safe", "headline": "Training is safe", "reasons": []}
    costs = {"kill": {"lost": "15 steps", "why": ""}, "sigterm": {"lost": "nothing", "why": "durable in 6 s"}}
    return {
        "phase": "running",
        "safety": safety | costs,
        "store": {"url": "s3://bucket/run", "reached": False},
        "degraded": False,
        "trainer": {"state": None, "ranks": 0, "step": None},
        "newest_durable_step": 40,
        "at_risk": dict.fromkeys(names) | {"grows": True} | risk,
        "throughput_bytes_per_s": 9_000_000,
        "bandwidth_limit_bytes_per_s": 5_000_000,
        "volume": {"free_bytes": 1, "total_bytes": 2},
        "termination": None,
        "flush": None,
    } | {name: {} for name in ("given_up", "rejected", "bad", "queue")}


@pytest.mark.parametrize(("ranks", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_the_status_counts_ranks(ranks: int, text: str) -> None:
    alive = status() | {"trainer": {"state": "running", "ranks": ranks, "step": 41}}
    assert f"\ntrainer    running, {text} alive, step 41\n" in status_text(alive)


def test_a_volume_that_cannot_be_read_is_no_dash() -> None:
    gone = status() | {"volume": {"free_bytes": None, "total_bytes": None}}
    assert "\nvolume     CANNOT BE READ: is it still mounted?" in status_text(gone)
