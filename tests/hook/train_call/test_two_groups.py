"""A script that destroys its process group between two trainings and initializes another one."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hook.job import SCRIPTS, Answers, finished, marker, training
from tests.marks import slow


@pytest.mark.parametrize("kind", ["plain", *slow("loop")])
def test_the_ranks_agree_in_the_group_that_the_script_has_now(kind: str, volume: Path, answers: Answers) -> None:
    """The second training ended with an error: the hook's own group was gone with the first one."""
    settings = answers.settings | {"CKPT_SAVE_STRATEGY": "steps", "CKPT_SAVE_STEPS": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, str(SCRIPTS / "two_groups.py"), kind]
    with ExitStack() as ranks:
        running = [
            ranks.enter_context(
                training(command, volume, settings | {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}, hooked=False)
            )
            for rank in ("0", "1")
        ]
        for rank, each in enumerate(running):
            assert each.wait() == 0, each.log()
            assert f"rank {rank} ended" in each.log()
        assert "WARNING" not in running[0].log() + running[1].log()
    steps = [f"checkpoint-{step}" for step in range(1, 7)]
    assert [name for name in finished(volume) if name != "final"] == steps
    assert {marker(volume, name)["world_size"] for name in steps} == {2}
    assert len({marker(volume, name)["attempt"] for name in steps}) == 1
