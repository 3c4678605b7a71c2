"""Folders of the script on the volume, whatever it calls them: what it writes there stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import Answers, finished, marker, script, training

pytestmark = pytest.mark.slow

ARGUMENTS = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "save_total_limit": 1}


@pytest.mark.parametrize("spelled", ["{}", "{}/../volume", "{}/inside", "{}-linked"])
def test_an_output_folder_that_is_the_volume_is_known_as_it(spelled: str, tmp_path: Path, answers: Answers) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "inside").symlink_to(volume)
    (tmp_path / "volume-linked").symlink_to(volume)
    told = script(args=ARGUMENTS | {"output_dir": spelled.format(volume)})
    with training(told, volume, answers.settings) as running:
        assert running.wait() == 0, running.log()
    assert finished(volume) == ["final", "checkpoint-8"], running.log()
    assert marker(volume, "checkpoint-8")["meta"]["owner"] == "script"
    assert "could not be published" not in running.log()


def test_a_volume_that_is_known_by_a_link_is_known_as_the_output_folder(tmp_path: Path, answers: Answers) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "volume").symlink_to(tmp_path / "disk")
    told = script(args=ARGUMENTS | {"output_dir": str(tmp_path / "disk")})
    with training(told, tmp_path / "volume", answers.settings) as running:
        assert running.wait() == 0, running.log()
    assert finished(tmp_path / "disk") == ["final", "checkpoint-8"], running.log()


def test_files_in_the_folder_of_the_final_model_stay(tmp_path: Path, answers: Answers) -> None:
    volume = tmp_path / "volume"
    (volume / "final").mkdir(parents=True)
    (volume / "final/notes.txt").write_text("mine")
    told = script(args=ARGUMENTS | {"output_dir": str(volume / "final")})
    with training(told, volume, answers.settings) as running:
        assert running.wait() == 0, running.log()
    assert (volume / "final/notes.txt").read_text() == "mine"
    assert (volume / "final/checkpoint-8/trainer_state.json").is_file()
    assert "checkpoint-8" in finished(volume)
    assert "holds other files than a checkpoint's: the final model is not saved there" in running.log()


def test_a_model_that_the_script_saves_as_final_is_its_own(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    told = script(args=ARGUMENTS, save_model=str(volume / "final"))
    with pod(volume, tmp_path / "store", {}) as (sidecar, found):
        with training(told, volume, found) as running:
            assert running.wait() == 0, running.log()
        assert "the script saves a model in final/" in running.log()
        assert finished(volume) == ["checkpoint-8"]
        assert (volume / "final/model.safetensors").is_file()
        assert sidecar.terminate() == 0, sidecar.log()
