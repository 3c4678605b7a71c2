"""State files: objects are restored exactly, from standard formats that cannot run code."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from trainer_hook.loops import loop, randomness, state_files
else:
    torch, loop, randomness, state_files = map(
        LazyModule, ("torch", *(f"trainer_hook.loops.{name}" for name in ("loop", "randomness", "state_files")))
    )


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def write(objects: dict[str, Any], folder: Path) -> list[str]:
    state_files.write(state_files.collect(objects), folder, rank=0, group=None)
    return sorted(path.name for path in folder.iterdir())


def load(objects: dict[str, Any], folder: Path) -> None:
    state_files.load(objects, folder, group=None)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_model_and_optimizer_come_back(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, 3)).sum().backward()
    optimizer.step()
    assert write({"model": model, "optimizer": optimizer}, tmp_path) == ["model.safetensors", "optimizer.pt"]
    again = net()
    theirs = torch.optim.AdamW(again.parameters(), lr=1)
    load({"model": again, "optimizer": theirs}, tmp_path)
    assert same(model, again)
    assert torch.equal(theirs.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert theirs.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_weights_that_share_memory_stay_tied(tmp_path: Path) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    assert write({"model": model}, tmp_path) == ["model.pt"]


def test_without_safetensors_weights_are_written_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    model, again = net(), net()
    assert write({"model": model}, tmp_path) == ["model.pt"]
    load({"model": again}, tmp_path)
    assert same(model, again)


def test_names_do_not_depend_on_how_a_model_is_wrapped(tmp_path: Path) -> None:
    model, again = net(), net()
    write({"model": torch.nn.DataParallel(model)}, tmp_path)
    load({"model": compiled(again)}, tmp_path)
    assert same(model, again)


def test_another_models_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    write({"model": net()}, tmp_path)
    with pytest.raises(state_files.StateMismatch, match=r"(?s)state of 'model' does not fit: .*0\.weight.*CKPT_STORE prefix"):
        load({"model": torch.nn.Sequential(torch.nn.Linear(2, 2))}, tmp_path)
    with pytest.raises(state_files.StateMismatch, match="no state of 'ema'"):
        load({"model": net(), "ema": net()}, tmp_path)


def compiled(inner: torch.nn.Module) -> torch.nn.Module:
    """Wrap a model as torch.compile does."""
    outer = torch.nn.Module()
    outer._orig_mod = inner
    return outer


class Own:
    """Has a state that torch.load would not read."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"deep": [self.value]}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["deep"][0]


def test_a_state_that_could_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(state_files.StateMismatch, match=r"own\.deep\[0\] is a .*Path.*add_safe_globals"):
        write({"own": Own(Path())}, tmp_path)
    assert not list(tmp_path.iterdir())


harmless = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner) | inner.map(lambda x: OrderedDict(a=x))
    ),
    max_leaves=8,
)


@given(harmless | st.just(Counter("abba")) | st.sets(st.integers()) | st.frozensets(st.text()))
def test_whatever_is_not_refused_is_read_again(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.mktemp("state")
    write({"own": Own(value)}, folder)
    again = Own(None)
    load({"own": again}, folder)
    assert again.value == value


@pytest.mark.parametrize("dtype", ["complex128", "complex32", "float8_e4m3fn", "bfloat16"])
def test_a_model_with_tensors_of_any_type_comes_back(dtype: str, tmp_path: Path) -> None:
    """safetensors has no complex128: every save failed."""
    told = torch.arange(4, dtype=torch.uint8).repeat(4).view(getattr(torch, dtype))
    model, again = net(), net()
    model.register_buffer("told", told)
    again.register_buffer("told", torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype)))
    write({"model": model}, tmp_path)
    load({"model": again}, tmp_path)
    assert same(model[:2], again[:2])
    assert torch.equal(again.told.view(torch.uint8), told.view(torch.uint8))


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=4))
def test_what_safetensors_refuses_for_shared_memory_is_known_beforehand(areas: list[tuple[int, int, int]]) -> None:
    from safetensors.torch import save

    storages = [torch.zeros(16), torch.zeros(16)]
    tensors = {str(n): storages[which][begin : begin + size] for n, (begin, size, which) in enumerate(areas)}
    try:
        save(tensors)
        is_refused = False
    except RuntimeError:
        is_refused = True
    assert (state_files.refused_by_safetensors(tensors) is not None) == is_refused


def test_an_object_without_state_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="scheduler: int has no state_dict"):
        LazyModule("trainer_hook.torch").Checkpointer(model=net(), scheduler=3)


def test_a_rank_misses_its_own_file_unless_the_number_of_ranks_changed() -> None:
    files = {"progress.json": 1, "rank_0.pt": 1}
    assert loop.missing_from(files, rank=0, world_size=2, saved_world_size=2) == []
    assert loop.missing_from(files, rank=1, world_size=2, saved_world_size=2) == ["rank_1.pt"]
    assert loop.missing_from(files, rank=1, world_size=2, saved_world_size=1) == []
    assert loop.missing_from({}, rank=0, world_size=1, saved_world_size=1) == ["progress.json", "rank_0.pt"]


def test_the_random_state_survives_its_file(tmp_path: Path) -> None:
    import random

    import numpy as np

    random.gauss(0, 1)
    np.random.randn()
    torch.save(randomness.portable(randomness.read()), tmp_path / "state.pt")
    drawn = [random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(1).item()]
    with randomness.untouched():
        torch.rand(3)
    randomness.restore(state_files.read_pt(tmp_path / "state.pt"))
    assert [random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(1).item()] == drawn
