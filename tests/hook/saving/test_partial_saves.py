"""A trainer whose saves hold only a part: nothing is published that no run could resume from, and training is not disturbed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import SCRIPTS, Answers, Training, finished, training, usual_start
from tests.hook.saving.test_step_saver import Writer, saver_on
from tests.hook.several import ThreadConsensus, on_ranks
from trainer_hook.saving.partial_saves import PartialSaves

SETTINGS = {"CKPT_SAVE_STRATEGY": "steps", "CKPT_SAVE_STEPS": "2"}


class Part(Writer):
    """Writes no optimizer in some tries."""

    may_write_part = True

    def __init__(self, *parts: bool) -> None:
        super().__init__()
        self.parts = parts

    def lacking(self, files: Any) -> list[str]:
        return ["optimizer.pt"] if self.tries <= len(self.parts) and self.parts[self.tries - 1] else []


def test_a_part_is_not_published_and_after_two_in_a_row_nothing_more_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = saver_on(tmp_path, writer := Part(True, False, True, True))
    assert [saver.save(step, "periodic") for step in (1, 2, 3, 4, 5)] == [False, True, False, False, False]
    assert saver.save_just_in_time(6) is False
    assert (writer.tries, finished(tmp_path)) == (4, ["checkpoint-2"])
    assert list(saver._session.not_saved) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    told = capsys.readouterr().err
    assert told.count("saves only a part of a checkpoint, without optimizer.pt") == 2
    assert told.count("nothing more is saved in this train() call") == 1


def test_a_part_just_in_time_is_written_once(tmp_path: Path) -> None:
    saver = saver_on(tmp_path, writer := Part(True, True))
    assert saver.save_just_in_time(3) is False
    assert writer.tries == 1


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_could_not_write_says_nothing_about_the_trainer(fails: int, tmp_path: Path) -> None:
    def examine(consensus: ThreadConsensus) -> tuple[bool, bool]:
        writer = Part(True)
        writer.tries = 1
        partial = PartialSaves(writer, consensus)
        answers = [partial.is_whole(tmp_path, wrote=consensus.world.rank != fails) for _ in range(3)]
        return all(answers), partial.are_usual

    assert on_ranks(2, examine) == [(True, False)] * 2


def test_a_rank_that_died_during_the_just_in_time_save_raises_nothing_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the process with 1 instead of 143."""
    saver = saver_on(tmp_path, writer := Part())

    def agree(yes: bool) -> bool:
        if writer.written:
            raise RuntimeError("Connection closed by peer")
        return yes

    monkeypatch.setattr(saver._consensus, "all_agree", agree)
    assert saver.save_just_in_time(5)
    assert finished(tmp_path) == ["checkpoint-5"]


def test_a_save_whose_files_cannot_be_seen_is_not_published_and_says_nothing_about_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error passed for a whole checkpoint."""
    saver = saver_on(tmp_path, Part())

    def fails(_: Path) -> Any:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("trainer_hook.saving.partial_saves.listed_files", fails)
        assert [saver.save(step, "periodic") for step in (1, 2, 3)] == [False] * 3
    assert saver.save(4, "periodic")
    assert finished(tmp_path) == ["checkpoint-4"]
    assert capsys.readouterr().err.count("is not published: its files cannot be listed ([Errno 5]") == 3


def test_nor_does_an_empty_folder_get_a_marker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(Writer):
        def write(self, folder: Path) -> None:
            folder.mkdir()

    assert not saver_on(tmp_path, Nothing()).save(1, "periodic")
    assert finished(tmp_path) == []
    assert "checkpoint-1 is empty" in capsys.readouterr().err


def test_all_ranks_know_what_rank_0_lacks(tmp_path: Path) -> None:
    def examine(consensus: ThreadConsensus) -> list[bool]:
        writer = Part(consensus.world.rank == 0)
        writer.tries = 1
        partial = PartialSaves(writer, consensus)
        return [partial.is_whole(tmp_path), partial.is_whole(tmp_path), partial.are_usual]

    assert on_ranks(3, examine) == [[False, False, True]] * 3


def partial_trainer(*arguments: Any) -> list[str]:
    return [sys.executable, str(SCRIPTS / "partial_saves.py"), *map(str, arguments)]


def told(run: Training) -> str:
    return "\n".join(line for line in run.log().splitlines() if line.startswith("[checkpoint]"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"CKPT_ASYNC": "1"}])
def test_a_trainer_that_saves_its_projector_alone_is_told_so_at_its_first_save(
    more: dict[str, str], volume: Path, answers: Answers
) -> None:
    """Each save was said to be one, and the next pod passed over all of them."""
    with training(partial_trainer(60, 0.2, "out"), volume, answers.settings | SETTINGS | more, start=usual_start) as running:
        running.at_step(5)
        assert running.terminate() == 143, running.log()
    assert finished(volume) == []
    assert "checkpoint-2 is not published: the trainer's own code saves only a part of a checkpoint" in told(running)
    assert " saved checkpoint-" not in told(running)
    assert "Traceback" not in running.log()


@pytest.mark.slow
def test_nor_are_the_parts_that_its_own_schedule_saves_published(volume: Path, answers: Answers) -> None:
    with training(partial_trainer(6, 0, volume, 2), volume, answers.settings | {"CKPT_SAVE_STRATEGY": "no"}) as running:
        assert running.wait() == 0, running.log()
    assert finished(volume) == ["final"]
    assert (volume / "checkpoint-2/projector.bin").is_file(), "the script's own file stays"
    assert "published checkpoint" not in told(running)
