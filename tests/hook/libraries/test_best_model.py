"""``load_best_model_at_end`` in a new pod, without the script's own copy of the best model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.several import ThreadConsensus, on_ranks
from trainer_hook.contract import checkpoint_name
from trainer_hook.libraries.transformers.best_model import BestModel, is_new_best


def trainer(best: Path | None, *, step: int = 8, best_step: int | None = 4, wanted: bool = True) -> Any:
    state = SimpleNamespace(global_step=step, best_global_step=best_step, best_model_checkpoint=best and str(best))
    loaded: list[str] = []
    return SimpleNamespace(
        state=state,
        args=SimpleNamespace(load_best_model_at_end=wanted),
        loaded=loaded,
        _load_best_model=lambda: loaded.append(state.best_model_checkpoint),
    )


def best_of(one: Any, volume: Path, bringing: Any = None, agree: Callable[[bool], bool] = bool) -> BestModel:
    return BestModel(one, volume, bringing, agree, checkpoint_name, is_noticed=lambda: False, stop_if_noticed=lambda: None)


def load(best: BestModel, one: Any) -> None:
    """Let the end of training load the best model, as Trainer does."""
    best.expect_on_volume()
    with best.from_store():
        one._load_best_model()


class Bringing:
    """Stands in for the question to the sidecar, which the tests of resuming ask for real."""

    def __init__(self, volume: Path, reason: str | None = None) -> None:
        self.volume, self.reason, self.asked = volume, reason, list[str]()
        self.usable = self.same = True

    def is_same_on_all(self, folder: Path) -> bool:
        return self.same

    def is_usable(self, name: str) -> bool:
        return self.usable

    def fetch(self, name: str, **_: Any) -> str | None:
        self.asked.append(name)
        if self.reason is None:
            (self.volume / name).mkdir(exist_ok=True)
        return self.reason


def test_only_the_best_of_a_script_that_ends_with_it_is_saved_at_once(tmp_path: Path) -> None:
    assert is_new_best(trainer(None, step=4))
    assert not is_new_best(trainer(None, step=4, wanted=False))
    assert not is_new_best(trainer(None, step=4, best_step=None))
    assert not is_new_best(trainer(None, step=8))


def test_a_best_model_that_is_still_there_is_left_to_the_script(tmp_path: Path) -> None:
    one = trainer(tmp_path)
    best_of(one, tmp_path / "volume").expect_on_volume()
    assert one.state.best_model_checkpoint == str(tmp_path)


@pytest.mark.parametrize("own", [None, Path("/nowhere/checkpoint-4")])
def test_one_that_is_gone_is_brought_when_it_is_to_be_loaded(own: Path | None, volume: Path) -> None:
    one, bringing = trainer(own), Bringing(volume)
    best = best_of(one, volume, bringing)
    best.expect_on_volume()
    assert bringing.asked == [], "it may never be needed"
    with best.from_store():
        one._load_best_model()
    assert (bringing.asked, one.loaded) == (["checkpoint-4"], [str(volume / "checkpoint-4")])


@pytest.mark.parametrize(("usable", "reason"), [(True, None), (False, None), (False, "not in the store")])
def test_a_nodes_own_part_of_it_is_completed(usable: bool, reason: str | None, volume: Path) -> None:
    """A volume that outlived the pod has the files that this node's ranks wrote, and no others."""
    (own := volume / "checkpoint-4").mkdir()
    one, bringing = trainer(own), Bringing(volume, reason)
    bringing.usable = usable
    best = best_of(one, volume, bringing)
    load(best, one)
    assert bringing.asked == ([] if usable else ["checkpoint-4"])
    assert one.loaded == [str(own)], "with nothing better the library looks there, as without the hook"


@pytest.mark.parametrize("reason", [None, "not in the store"])
def test_parts_of_different_saves_are_no_best_model(reason: str | None, volume: Path) -> None:
    (own := volume / "checkpoint-4").mkdir()
    one, bringing = trainer(own), Bringing(volume, reason)
    bringing.same = False
    best = best_of(one, volume, bringing)
    load(best, one)
    assert bringing.asked == ["checkpoint-4"]
    assert one.loaded == ([] if reason else [str(own)])


def test_one_that_cannot_be_had_is_said_and_training_ends_all_the_same(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, bringing = trainer(None), Bringing(volume, "not in the store")
    best = best_of(one, volume, bringing)
    load(best, one)
    assert (one.loaded, one.state.best_model_checkpoint) == ([], None)
    assert "training ends with the last weights" in capsys.readouterr().err


def loaded_on_ranks(tmp_path: Path, *, own: list[bool], better: list[bool]) -> list[str]:
    """Return what each node loads. ``own``: has its copy of the best model; ``better``: has one that it saved later."""

    def train(consensus: ThreadConsensus) -> str:
        node = tmp_path / f"node-{consensus.world.rank}"
        (volume := node / "volume").mkdir(parents=True)
        if own[consensus.world.rank]:
            (node / "checkpoint-4").mkdir()

        class Fetching(Bringing):
            def fetch(self, name: str, **_: Any) -> str | None:
                consensus.all_agree(True)
                return super().fetch(name)

        one = trainer(node / "checkpoint-4")
        best = best_of(one, volume, Fetching(volume), consensus.all_agree)
        best.expect_on_volume()
        if any(better):
            one.state.best_global_step = 6
        if better[consensus.world.rank]:
            one.state.best_model_checkpoint = str(node / "checkpoint-6")
        with best.from_store():
            one._load_best_model()
        [path] = one.loaded
        return str(Path(path).relative_to(node))

    return on_ranks(2, train)


@pytest.mark.parametrize(
    ("own", "better", "loaded"),
    [
        ([True, False], [False, False], "volume/checkpoint-4"),
        ([False, False], [False, False], "volume/checkpoint-4"),
        ([True, True], [False, False], "checkpoint-4"),
        ([False, False], [True, True], "checkpoint-6"),
        ([True, False], [True, False], "volume/checkpoint-6"),
    ],
)
def test_all_nodes_look_on_the_volume_where_one_has_no_copy(
    own: list[bool], better: list[bool], loaded: str, tmp_path: Path
) -> None:
    assert loaded_on_ranks(tmp_path, own=own, better=better) == [loaded] * 2
