"""``torch.distributed.checkpoint`` is called as each version of PyTorch wants it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    import torch.distributed.checkpoint as dcp

    from trainer_hook.asynchronous import sharded
else:
    torch, dcp, sharded = map(LazyModule, ("torch", "torch.distributed.checkpoint", "trainer_hook.asynchronous.sharded"))


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
def test_a_save_without_a_process_group_is_read_again(tmp_path: Path) -> None:
    """With PyTorch 2.5 every save of a sharded model had failed: ``save`` has no ``no_dist`` there."""
    sharded.save({"numbers": torch.arange(4)}, tmp_path / "shards", None)
    state = {"numbers": torch.zeros(4, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=tmp_path / "shards", **sharded.alone_as_told(dcp.load))
    assert state["numbers"].tolist() == [0, 1, 2, 3]
