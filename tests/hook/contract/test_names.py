from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from tests.outcome import outcome
from trainer_hook import contract
from trainer_hook.contract import ContractError, check_id, check_path, checkpoint_name, is_checkpoint_name, step_of
from trainer_hook.contract.names import MAX_PATH_BYTES


@given(strategies.steps)
def test_a_step_survives_its_name(step: int) -> None:
    assert step_of(checkpoint_name(step)) == step


@given(st.text(max_size=30) | st.text("checkpoint-0123456789.", max_size=24) | st.from_regex(r"checkpoint-\d+.?"))
def test_a_name_with_a_step_is_the_only_name_of_that_step(name: str) -> None:
    step = step_of(name)
    assert step is None or checkpoint_name(step) == name


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-20.tmp",
        "checkpoint-007",
        "checkpoint-00",
        "checkpoint-1e3",
        "checkpoint--1",
        "checkpoint-+1",
        "checkpoint-",
        "checkpoint-1_000",
        "checkpoint-20 ",
        " checkpoint-20",
        "checkpoint-20\n",
        "checkpoint-٢٠",
        "checkpoint-²",
        "tmp-checkpoint-20",
        "Checkpoint-20",
        "checkpoint_20",
        "checkpoint-20/",
        "checkpoint-1000000000000000000",
        "final2",
        "Final",
        "",
        ".ckpt",
        ".complete",
    ],
)
def test_other_peoples_directories_are_not_checkpoints(name: str) -> None:
    assert step_of(name) is None
    assert not is_checkpoint_name(name)


def test_checkpoint_20_and_final_are_checkpoint_names() -> None:
    assert is_checkpoint_name("checkpoint-20")
    assert is_checkpoint_name("checkpoint-0")
    assert is_checkpoint_name("final")
    assert step_of("final") is None


@given(st.text(max_size=40) | st.text("./a\\ \0\n", max_size=12) | st.text(st.characters(), max_size=12) | strategies.paths)
def test_a_path_that_passes_stays_inside_its_checkpoint_and_clear_of_the_systems_names(path: str) -> None:
    checked = outcome(check_path, path)
    if isinstance(checked, ContractError):
        return
    assert checked is path
    parts = PurePosixPath("/run/checkpoint-20", path).parts
    assert parts[:3] == ("/", "run", "checkpoint-20")
    assert len(parts) > 3
    assert ".." not in parts
    assert parts[3] not in (contract.SYSTEM_DIR, contract.MARKER)
    # Nothing is normalised away, so the object key and the place on disk name one thing.
    assert "/".join(parts[3:]) == path
    assert len(path.encode()) <= MAX_PATH_BYTES
    assert path.isprintable() or not any(ord(c) < 32 or ord(c) == 127 for c in path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../x",
        "a/../../x",
        "a/..",
        ".",
        "./a",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "\ud800",
        ".ckpt",
        ".ckpt/token",
        ".complete",
        ".complete/x",
        "x" * (MAX_PATH_BYTES + 1),
        "ü" * (MAX_PATH_BYTES // 2 + 1),
    ],
)
def test_a_path_that_leaves_the_checkpoint_or_takes_a_name_of_the_system_is_refused(path: str) -> None:
    with pytest.raises(ContractError):
        check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "a/b.pt",
        "..a",
        "a..",
        "...",
        ".hidden",
        "a/.complete",
        "a/.ckpt/b",
        "ü/模型.pt",
        "a b",
        "a\\..\\b",
        "x" * MAX_PATH_BYTES,
    ],
)
def test_every_other_name_that_a_disk_holds_is_allowed(path: str) -> None:
    assert check_path(path) == path


@given(st.text(max_size=140))
def test_an_id_that_passes_is_safe_as_one_part_of_a_key(value: str) -> None:
    checked = outcome(check_id, value, what="attempt")
    if isinstance(checked, ContractError):
        assert "attempt" in str(checked)
    else:
        assert checked is value
        assert 1 <= len(value) <= 128
        assert value.isascii()
        assert not set(value) & set("/\\ \n%?#")
        assert value not in (".", "..")


@given(strategies.ids)
def test_every_id_of_the_contract_passes(value: str) -> None:
    assert check_id(value, what="run id") == value


@pytest.mark.parametrize("value", ["", ".", "..", "-a", "_a", "a/b", "a\n", "a b", "ä", "a" * 129])
def test_an_id_that_could_lead_elsewhere_is_refused(value: str) -> None:
    with pytest.raises(ContractError, match="run id"):
        check_id(value, what="run id")
