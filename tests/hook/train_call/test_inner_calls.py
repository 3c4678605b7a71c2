"""A training inside another one, such as of a probe in a callback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hook.job import SCRIPTS, Answers, finished, marker, training


@pytest.mark.slow
def test_a_training_inside_another_one_is_a_part_of_its_step(volume: Path, answers: Answers) -> None:
    """It was resumed from the checkpoint of the outer one, counted as the next call, and left SIGTERM without a save."""
    command, settings = [sys.executable, str(SCRIPTS / "nested.py")], answers.settings | {"CKPT_SAVE_STEPS": "3"}
    with training([*command, "6"], volume, settings) as running:
        assert running.wait() == 143, running.log()
        assert "probes ended at 5 and 6" in running.log()
        assert finished(volume) == ["checkpoint-3", "checkpoint-6"]
    answers.by_call["POST /v1/resume"] = (
        202,
        {"state": "ready", "checkpoint": "checkpoint-6", "source": "local", "meta": marker(volume, "checkpoint-6")["meta"]},
    )
    with training([*command, "0"], volume, settings) as running:
        assert running.wait() == 0, running.log()
        assert running.steps() == [7, 8]
        assert marker(volume, "final")["step"] == 8
