"""Tables: plain and as wide as they are in a pipe, fitted to the width of a terminal."""

from __future__ import annotations

import re
import sys

import pytest

from sidecar.cli.render import status_text, table

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
    ("seconds", "text"), [(None, "–"), (4.25, "4.2 s"), (125, "2 min 5 s"), (3600, "1 h 0 min"), (9000, "2 h 30 min")]
)
def test_the_status_shows_a_time_as_people_say_it(seconds: float | None, text: str) -> None:
    risk = dict.fromkeys(("steps_at_risk", "predicted_durable_s", "predicted_save_s", "predicted_flush_s", "advice"))
    status = {
        "phase": "running",
        "store": {"url": "s3://bucket/run", "reached": False},
        "degraded": False,
        "trainer": {"state": None, "ranks": 0, "step": None},
        "newest_durable_step": 40,
        "at_risk": risk | {"seconds_at_risk": seconds},
        "throughput_bytes_per_s": 9 << 20,
        "bandwidth_limit_bytes_per_s": 5 << 20,
        "volume": {"free_bytes": 1, "total_bytes": 2},
        "termination": None,
        "flush": None,
    } | {name: {} for name in ("given_up", "rejected", "quarantined", "queue")}
    assert f"durable    step 40, at risk: {text}, – steps\n" in status_text(status)
    assert "at 5 MiB/s" in status_text(status), "the limit, where it is what holds the uploads up"
