"""Callbacks whose states Trainer restores go on where they were, in a run that is interrupted more than once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import SCRIPTS, Training, training


def command(stop_at: int) -> list[str]:
    return [sys.executable, str(SCRIPTS / "callbacks.py"), str(stop_at)]


def end(run: Training) -> list[str]:
    return re.findall(r"^(?:budgets|weights) .*$", run.log(), re.MULTILINE)


def evaluations(*runs: Training) -> list[str]:
    return [found for run in runs for found in re.findall(r"^evaluated \d+$", run.log(), re.MULTILINE)]


@pytest.mark.slow
def test_restored_callbacks_count_each_step_once_and_end_training_where_they_would(tmp_path: Path) -> None:
    """Restored callbacks ran after the hook: a just-in-time save lacked their step, and that they had ended training."""
    store, runs = tmp_path / "store", list[Training]()
    for number, stop_at in enumerate((3, 9, 0)):
        volume = tmp_path / f"volume-{number}"
        with pod(volume, store) as (sidecar, found), training(command(stop_at), volume, found) as run:
            assert run.wait() == (143 if stop_at else 0), run.log()
            sidecar.terminate()
        runs.append(run)
    with training(command(0), tmp_path / "alone", hooked=False) as alone:
        assert alone.wait() == 0, alone.log()
    assert [run.steps() for run in runs] == [[1, 2, 3], [4, 5, 6, 7, 8, 9], []]
    assert end(alone) == end(runs[-1]), runs[-1].log()
    assert evaluations(*runs) == evaluations(alone)
