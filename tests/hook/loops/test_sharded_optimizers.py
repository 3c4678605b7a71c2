"""The optimizer of a sharded model comes back as it was, also where not every parameter has had a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hook.versions import SHARDS_ON_CPU
from tests.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from trainer_hook.loops import state_files
else:
    torch, state_files = map(LazyModule, ("torch", "trainer_hook.loops.state_files"))

pytestmark = [pytest.mark.slow, SHARDS_ON_CPU]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A process group of one rank."""
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def sharded() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = torch.nn.Module()
    for name in ("used", "later"):
        model.add_module(name, fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def learn(objects: dict[str, Any], *parts: str) -> None:
    """Step without a backward pass, after which this process could not be forked for a training of another test."""
    for part in parts:
        for parameter in objects["model"].get_submodule(part).parameters():
            parameter.grad = torch.ones_like(parameter)
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def saved_and_loaded(objects: dict[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    state_files.write(state_files.collect(objects), folder, rank=0, group=group)
    again = sharded()
    state_files.load(again, folder, group=group)
    return again


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(*(objects["model"].parameters() for objects in (one, other)), strict=True)
    for mine, theirs in pairs:
        state, again = (o["optimizer"].state.get(p, {}) for o, p in ((one, mine), (other, theirs)))
        if list(state) != list(again) or not all(torch.equal(_whole(state[key]), _whole(again[key])) for key in state):
            return False
        if not torch.equal(_whole(mine.detach()), _whole(theirs.detach())):
            return False
    return True


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def test_a_parameter_that_has_had_no_gradient_has_no_state_afterwards(group: Any, tmp_path: Path) -> None:
    trained = sharded()
    learn(trained, "used")
    again = saved_and_loaded(trained, tmp_path, group)
    assert same(trained, again)
    for objects in (trained, again):
        learn(objects, "used", "later")
    assert same(trained, again)


def test_a_save_before_the_first_step_of_the_optimizer_counts_none(group: Any, tmp_path: Path) -> None:
    """A scaler skips the first steps while its scale is too large."""
    untrained = sharded()
    again = saved_and_loaded(untrained, tmp_path, group)
    assert not untrained["optimizer"].state
    assert not again["optimizer"].state


def test_the_state_of_another_optimizer_is_an_error(group: Any, tmp_path: Path) -> None:
    trained = sharded()
    learn(trained, "used", "later")
    state_files.write(state_files.collect(trained), tmp_path, rank=0, group=group)
    other = sharded()
    other["optimizer"] = torch.optim.Adagrad(other["model"].parameters())
    with pytest.raises(state_files.StateMismatch, match="CKPT_STORE prefix"):
        state_files.load(other, tmp_path, group=group)
