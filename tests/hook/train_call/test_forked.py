"""Training in a forked child of a process that has only imported the library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import SCRIPTS, finished, marker, training

COMMAND = [sys.executable, str(SCRIPTS / "in_child.py")]


def command(sleep_s: float) -> list[str]:
    return [*COMMAND, json.dumps({"args": {"max_steps": 12}, "sleep_s": sleep_s})]


@pytest.mark.slow
def test_a_forked_child_is_saved_and_resumed(tmp_path: Path) -> None:
    """It trained without a word: nothing was saved, nothing resumed."""
    volume, store = tmp_path / "volume", tmp_path / "store"
    with pod(volume, store) as (_, found):
        with training(command(0.2), volume, found | {"CKPT_SAVE_STEPS": "5"}) as first:
            first.at_step(7)
            assert first.terminate() == 143, first.log()
        assert marker(volume, finished(volume)[-1])["reason"] == "jit"
        with training(command(0.0), volume, found) as second:
            assert second.wait() == 0, second.log()
    assert second.steps() == list(range(first.steps()[-1] + 1, 13))
    assert "everything is durable" in second.log()
    for log in (first.log(), second.log()):
        assert "nothing was saved" not in log
        assert "did not end with the SystemExit" not in log
