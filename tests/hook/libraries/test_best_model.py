"""``load_best_model_at_end`` in a new pod, without the script's own copy of the best model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_hook.contract import checkpoint_name
from trainer_hook.libraries.transformers.best_model import best_from_store, expect_best_on_volume, is_new_best


def trainer(best: Path | None, *, step: int = 8, best_step: int | None = 4, wanted: bool = True) -> Any:
    state = SimpleNamespace(global_step=step, best_global_step=best_step, best_model_checkpoint=best and str(best))
    loaded: list[str] = []
    return SimpleNamespace(
        state=state,
        args=SimpleNamespace(load_best_model_at_end=wanted),
        loaded=loaded,
        _load_best_model=lambda: loaded.append(state.best_model_checkpoint),
    )


class Bringing:
    """Stands in for the question to the sidecar, which the tests of resuming ask for real."""

    def __init__(self, volume: Path, reason: str | None = None) -> None:
        self.volume, self.reason, self.asked = volume, reason, list[str]()

    def fetch(self, name: str) -> str | None:
        self.asked.append(name)
        if self.reason is None:
            (self.volume / name).mkdir()
        return self.reason


def test_only_the_best_of_a_script_that_ends_with_it_is_saved_at_once(tmp_path: Path) -> None:
    assert is_new_best(trainer(None, step=4))
    assert not is_new_best(trainer(None, step=4, wanted=False))
    assert not is_new_best(trainer(None, step=4, best_step=None))
    assert not is_new_best(trainer(None, step=8))


def test_a_best_model_that_is_still_there_is_left_to_the_script(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    expect_best_on_volume(one, tmp_path / "volume", checkpoint_name)
    assert one.state.best_model_checkpoint == str(tmp_path)


@pytest.mark.parametrize("best", [None, Path("/nowhere/checkpoint-4")])
def test_one_that_is_gone_is_brought_when_it_is_to_be_loaded(best: Path | None, volume: Path) -> None:
    one, bringing = trainer(best), Bringing(volume)
    expect_best_on_volume(one, volume, checkpoint_name)
    assert bringing.asked == [], "it may never be needed"
    with best_from_store(one, volume, bringing, bool):  # type: ignore[arg-type]
        one._load_best_model()
    assert (bringing.asked, one.loaded) == (["checkpoint-4"], [str(volume / "checkpoint-4")])


def test_one_that_cannot_be_had_is_said_and_training_ends_all_the_same(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, bringing = trainer(None), Bringing(volume, "not in the store")
    expect_best_on_volume(one, volume, checkpoint_name)
    with best_from_store(one, volume, bringing, bool):  # type: ignore[arg-type]
        one._load_best_model()
    assert (one.loaded, one.state.best_model_checkpoint) == ([], None)
    assert "training ends with the last weights" in capsys.readouterr().err
