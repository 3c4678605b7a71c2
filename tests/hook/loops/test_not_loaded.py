"""A checkpoint that passes every check, and that its library cannot load: the log names it, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hook.job import Answers, finished, script, training
from tests.lazy import LazyModule
from trainer_hook.contract import MARKER

trainings = LazyModule("tests.hook.loops.short_trainings")
LIBRARY = {"lightning": "lightning.pytorch"}


def destroy(folder: Path, *, but: tuple[str, ...] = (MARKER, "progress.json", "trainer_state.json")) -> None:
    """Let every file keep its size, and nothing else."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in but:
            path.write_bytes(bytes(path.stat().st_size))


def expect_told(log: str, name: str) -> None:
    [told] = [line for line in log.splitlines() if f"{name} was not loaded (" in line]
    assert "CKPT_STORE" in told
    assert "'checkpoint-sidecar rm'" in told


@pytest.mark.parametrize("loop", ["shuffled", "lightning"])
def test_a_loop_that_cannot_load_its_checkpoint_names_it_and_what_to_do(
    loop: str, environ: dict[str, str], volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if loop in LIBRARY:
        pytest.importorskip(LIBRARY[loop])
    trainings.imported_once()
    assert trainings.life(loop, 4, environ)[0] == 143
    destroy(volume / "checkpoint-4")
    capfd.readouterr()
    assert trainings.life(loop, None, environ)[0] == 1
    expect_told(capfd.readouterr().err, "checkpoint-4")


def test_a_trainer_that_cannot_load_its_checkpoint_names_it_and_what_to_do(
    environ: dict[str, str], answers: Answers, volume: Path
) -> None:
    with training(script(), volume, answers.settings) as first:
        first.at_step(3)
        assert first.terminate() == 143
    name = finished(volume)[-1]
    destroy(volume / name)
    with training(script(), volume, answers.settings) as second:
        assert second.wait() == 1, second.log()
        expect_told(second.log(), name)
