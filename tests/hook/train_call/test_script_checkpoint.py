"""Which checkpoint is used where the script names one of its own: the same on every rank."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.several import ThreadConsensus, on_ranks
from trainer_hook.contract import Marker
from trainer_hook.libraries.transformers.driver import TrainerDriver
from trainer_hook.resuming.resumer import CannotResume, Choice, Resumer
from trainer_hook.train_call.train_call import TrainCall
from trainer_hook.volume.checkpoint_folder import finish

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Ranks that are threads would import it at the same time."""
    importlib.import_module("transformers.trainer_utils")


def checkpoint(folder: Path, step: int, *, lacks: str = "") -> None:
    (one := folder / f"checkpoint-{step}").mkdir(parents=True)
    (one / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in FILES:
        if name != lacks:
            (one / name).write_bytes(b"x")


def resumed(tmp_path: Path, *, own: list[Any], chosen: str | None = "checkpoint-500", fails: bool = False) -> list[Any]:
    """Return for each rank what ``resume`` chooses, and whether the script's choice stands."""

    def resume(consensus: ThreadConsensus) -> Any:
        rank = consensus.world.rank
        settings = SimpleNamespace(dir=tmp_path, fail_without_store=fails)
        session: Any = SimpleNamespace(
            settings=settings, train_calls=0, is_first_call=True, base_step=0, continues_from=lambda *_, **__: None
        )
        call = TrainCall.__new__(TrainCall)
        call.session, call.consensus = session, consensus
        trainer = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path / f"node-{rank}")))
        call._driver = TrainerDriver(session, trainer, own[rank])
        call.resumer = Resumer(session.settings, None, consensus, missing=call._driver.missing_files)  # type: ignore[arg-type]
        call.resumer.choose = lambda _: None if chosen is None else Choice(chosen, tmp_path / chosen, {})  # type: ignore[method-assign]
        choice = call.resume()
        return choice and choice.name, call.script_choice_stands

    return on_ranks(len(own), resume)


@pytest.mark.parametrize("has_older", [True, False])
def test_a_node_that_kept_a_newer_one_of_its_own_goes_back_with_the_new_pod(tmp_path: Path, has_older: bool) -> None:
    checkpoint(tmp_path / "node-0", 600)
    if has_older:
        checkpoint(tmp_path / "node-1", 500)
    assert resumed(tmp_path, own=[True, True]) == [("checkpoint-500", False)] * 2


def test_one_that_another_node_has_only_in_part_is_not_used(tmp_path: Path) -> None:
    checkpoint(tmp_path / "node-0", 600)
    checkpoint(tmp_path / "node-1", 600, lacks="optimizer.pt")
    assert resumed(tmp_path, own=[True, True]) == [("checkpoint-500", False)] * 2


def test_one_that_every_node_has_on_a_disk_of_its_own_is_used_if_it_is_further(tmp_path: Path) -> None:
    for node in (0, 1):
        checkpoint(tmp_path / f"node-{node}", 600)
    own = [tmp_path / "node-0/checkpoint-600", tmp_path / "node-1/checkpoint-600"]
    assert resumed(tmp_path, own=own) == [(None, True)] * 2
    assert resumed(tmp_path, own=own, chosen="checkpoint-700") == [("checkpoint-700", True)] * 2


@pytest.mark.parametrize(("attempts", "chosen"), [("aa", (None, True)), ("ab", ("checkpoint-500", False))])
def test_parts_of_different_attempts_are_not_one_checkpoint(attempts: str, chosen: Any, tmp_path: Path) -> None:
    """A script with its ``output_dir`` on the volume: each node has a part of a step, one of them of an earlier job."""
    for node, attempt in enumerate(attempts):
        checkpoint(tmp_path / f"node-{node}", 600)
        finish(tmp_path / f"node-{node}/checkpoint-600", Marker(step=600, attempt=attempt))
    assert resumed(tmp_path, own=[True, True]) == [chosen] * 2


def test_without_another_one_no_rank_goes_on_from_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "node-0", 600)
    assert resumed(tmp_path, own=[True, True], chosen=None) == [(None, False)] * 2
    assert "TRAINING STARTS FROM SCRATCH" in capsys.readouterr().err
    with pytest.raises(CannotResume):
        resumed(tmp_path, own=[True, True], chosen=None, fails=True)


def test_of_what_is_no_checkpoint_of_trainer_nothing_is_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").touch()
    assert resumed(tmp_path, own=[tmp_path / "model", tmp_path / "nowhere" / "model"]) == [("checkpoint-500", True)] * 2
    assert "cannot be resumed exactly" not in capsys.readouterr().err


def test_one_that_cannot_be_read_on_a_node_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (0, 1):
        checkpoint(tmp_path / f"node-{node}", 600)
    lacks = Resumer.lacks

    def failing(self: Resumer, folder: Path) -> list[str]:
        if "node-1" in str(folder):
            raise OSError(5, "Input/output error")
        return lacks(self, folder)

    monkeypatch.setattr(Resumer, "lacks", failing)
    assert resumed(tmp_path, own=[True, True]) == [("checkpoint-500", False)] * 2


@pytest.mark.parametrize(("steps", "stands"), [([600, 600], True), ([600, 500], False)])
def test_lightnings_file_of_one_name_may_be_of_another_step_on_another_node(
    steps: list[int], stands: bool, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from trainer_hook.libraries.lightning_fit import Fit

    def resume(consensus: ThreadConsensus) -> bool:
        rank = consensus.world.rank
        (own := tmp_path / f"node-{rank}").mkdir()
        torch.save({"global_step": steps[rank]}, own / "last.ckpt")
        fit = Fit.__new__(Fit)
        fit._world, fit._ckpt_path = consensus.world, str(own / "last.ckpt")
        call = TrainCall.__new__(TrainCall)
        settings: Any = SimpleNamespace(dir=tmp_path, fail_without_store=False)
        call.consensus, call._driver = consensus, fit
        call.resumer = Resumer(settings, None, consensus, missing=lambda *_, **__: [])  # type: ignore[arg-type]
        call.session = SimpleNamespace(settings=settings)  # type: ignore[assignment]
        named = call._script_checkpoint(None)
        assert (named is not None) == call.script_choice_stands
        return call.script_choice_stands

    assert on_ranks(2, resume) == [stands] * 2
