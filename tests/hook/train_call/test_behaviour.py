"""Trainer with the hook behaves as without: events, files, states, errors, random numbers and weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import SCRIPTS, Answers, finished, training
from tests.hook.versions import TRAINER_5

pytestmark = [pytest.mark.slow, TRAINER_5]
COMMAND = [sys.executable, str(SCRIPTS / "behaviour.py")]


def cases(log: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for line in log.splitlines():
        if line.startswith('{"'):
            told |= json.loads(line)
    return told


def test_every_case_is_told_alike(volume: Path, answers: Answers) -> None:
    settings = answers.settings | {"CKPT_SAVE_STEPS": "2", "CKPT_SAVE_TOTAL_LIMIT": "2"}
    with (
        training(COMMAND, volume, settings) as hooked,
        training(COMMAND, volume.parent / "alone", hooked=False) as alone,
    ):
        assert hooked.wait(timeout_s=150) == 0, hooked.log()
        assert alone.wait(timeout_s=150) == 0, alone.log()
    expected, seen = cases(alone.log()), cases(hooked.log())
    assert len(expected) == 10
    assert all(expected.values())
    assert [name for name in expected if seen[name] != expected[name]] == []
    assert hooked.log().count("saved checkpoint-") > 50, "the hook was at work in every case"
    assert "WARNING" not in hooked.log()
    assert finished(volume)
