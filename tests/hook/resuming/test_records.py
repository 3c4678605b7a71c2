"""Records in a checkpoint that are valid JSON of another form: the checkpoint is passed over, and no rank ends by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hook.resuming.test_resumer import Asked, none_missing
from trainer_hook.contract import ContractError, ListedFile, Marker
from trainer_hook.libraries.transformers.checkpoint_files import parse_state, read_state
from trainer_hook.loops.position import parse_position
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.process.settings import from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.volume.checkpoint_folder import finish

DEEP = "[" * 100_000
STATE = {"global_step": 5, "max_steps": 9, "num_train_epochs": 3, "epoch": 0.5, "log_history": [{"loss": 1.0}]}
POSITION = {"step": 5, "epoch": 0, "batch": 5, "world_size": 1, "finished": False, "objects": ["model"]}


def chosen(volume: Path, name: str, content: str, **more: Any) -> str | None:
    """Return the choice where the newer one of two checkpoints holds a file."""
    for step in (5, 10):
        (folder := volume / f"checkpoint-{step}").mkdir()
        (folder / "model").write_bytes(b"weights")
        if step == 10:
            (folder / name).write_text(content)
        finish(folder, Marker(step=step, files=(ListedFile("model", 7),)))
    client = Asked(volume)
    client.older_checkpoints = lambda than_step, **_: iter([])  # type: ignore[method-assign]
    settings = from_environment({"CKPT_DIR": str(volume)})
    choice = Resumer(settings, client, RankConsensus(), missing=none_missing, **more).choose(0)
    return choice.name if choice else None


MALFORMED = ["[]", "5", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["x"]}}', "{", DEEP]


@pytest.mark.parametrize("content", MALFORMED, ids=lambda content: content[:30])
def test_an_index_of_weights_that_is_none(content: str, volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(volume, "model.safetensors.index.json", content) is None
    assert "checkpoint-10 is passed over: it cannot be read: " in capsys.readouterr().err


@pytest.mark.parametrize("content", MALFORMED, ids=lambda content: content[:30])
def test_a_file_of_the_script_whose_name_ends_alike_is_no_index_of_weights(content: str, volume: Path) -> None:
    assert chosen(volume, "faiss.index.json", content) == "checkpoint-10"


def test_a_shard_that_is_missing_is_named(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.dumps({"weight_map": {"a": "model", "b": "model-2"}})
    assert chosen(volume, "model.safetensors.index.json", content) is None
    assert "checkpoint-10 is passed over: model-2 missing" in capsys.readouterr().err


def test_what_the_library_cannot_read_of_its_own_records(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(folder: Path) -> None:
        if folder.name == "checkpoint-10":
            parse_state((folder / "trainer_state.json").read_bytes())

    assert chosen(volume, "trainer_state.json", "[]", check=check) is None
    assert "checkpoint-10 is passed over: it cannot be read: trainer_state.json" in capsys.readouterr().err


WRONG_STATES = [
    "[]",
    "5",
    DEEP,
    *(
        json.dumps(STATE | {name: value})
        for name, value in (
            ("global_step", "x"),
            ("global_step", 1.5),
            ("epoch", "y"),
            ("epoch", [1]),
            ("max_steps", "z"),
            ("log_history", {}),
            ("log_history", [1]),
            ("stateful_callbacks", []),
        )
    ),
]


@pytest.mark.parametrize("content", WRONG_STATES, ids=lambda content: content[:60])
def test_a_state_of_trainer_with_a_field_of_another_type(content: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"^trainer_state\.json: "):
        parse_state(content.encode())
    (tmp_path / "trainer_state.json").write_text(content)
    assert read_state(tmp_path) == {}


@pytest.mark.parametrize("more", [{}, {"epoch": None}, {"loss": float("nan"), "num_train_epochs": (1 << 63) - 1}])
def test_a_state_as_trainer_writes_it(more: dict[str, Any]) -> None:
    assert parse_state(json.dumps(STATE | more).encode())["global_step"] == 5


WRONG_POSITIONS = [
    "[]",
    DEEP,
    json.dumps({name: value for name, value in POSITION.items() if name != "batch"}),
    *(
        json.dumps(POSITION | {name: value})
        for name, value in (
            ("step", "5"),
            ("batch", -1),
            ("world_size", 0),
            ("objects", 5),
            ("objects", [5]),
            ("finished", 1),
        )
    ),
]


@pytest.mark.parametrize("content", WRONG_POSITIONS, ids=lambda content: content[:60])
def test_a_position_with_a_field_of_another_type(content: str) -> None:
    with pytest.raises(ContractError, match=r"^progress\.json: "):
        parse_position(content.encode())


def test_a_position_as_a_loop_and_as_lightning_write_it() -> None:
    assert parse_position(json.dumps(POSITION).encode()) == POSITION
    alike = {name: POSITION[name] for name in ("step", "epoch", "batch", "world_size")} | {"unfinished": ["validation"]}
    assert parse_position(json.dumps(alike).encode()) == alike
