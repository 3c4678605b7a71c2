"""Plain PyTorch: a training loop that saves, stops in time and continues at the same batch.

```python
from trainer_hook.torch import Checkpointer

with Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
    for epoch in ckpt.epochs(3):
        for batch in ckpt.steps(loader):
            ...
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_hook.contract import META_OWN_SHARDS
from trainer_hook.loops import state_files
from trainer_hook.loops.loop import Loop
from trainer_hook.process.log import say

__all__ = ["Checkpointer"]


class StatefulLoop(Loop):
    """A loop with named objects that have ``state_dict`` and ``load_state_dict``."""

    def __init__(self, objects: Mapping[str, Any], sampler: Any = None) -> None:
        """``None`` among the objects stands for one that this run does not use.

        Raises:
            TypeError: An object has no state.
        """
        super().__init__(sampler)
        self._objects = {name: thing for name, thing in objects.items() if thing is not None}
        for name, thing in self._objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"{name}: {type(thing).__name__} has no state_dict() and load_state_dict()")

    def _write(self, folder: Path) -> None:
        self._write_objects(self._objects, folder)

    def _write_objects(self, objects: Mapping[str, Any], folder: Path) -> None:
        state_files.write(state_files.collect(objects), folder, rank=self._world.rank, group=self._group)

    def _about(self) -> dict[str, Any]:
        return {"objects": sorted(self._objects)}

    def _meta(self) -> dict[str, Any]:
        alike = state_files.is_sharded(self._objects) and state_files.reads_own_shards(self._objects, self._world.size)
        return {META_OWN_SHARDS: True} if alike else {}

    def _reads_all(self) -> bool:
        session = self._session
        size = 1 if session is None else session.join().world.size
        return not state_files.reads_own_shards(self._objects, size)

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        saved = progress.get("objects", [])
        if lacking := sorted(set(self._objects) - set(saved)):
            raise state_files.DoesNotFit(
                f"{folder.name} holds {', '.join(saved)}, but not {', '.join(lacking)}: "
                "resume with the objects that were saved, or begin anew under another CKPT_STORE prefix"
            )
        if unused := sorted(set(saved) - set(self._objects)):
            say(f"{folder.name}: {', '.join(unused)} is there, but nothing to load it into")
        state_files.load(self._objects, folder, group=self._group)

    @property
    def _group(self) -> Any:
        return None if self._session is None else self._session.join().group


class Checkpointer(StatefulLoop):
    """Saves and restores objects that have ``state_dict`` and ``load_state_dict``, the loop's place and the random state.

    Sharded models (``fully_shard``, FSDP) and their optimizers go through ``torch.distributed.checkpoint`` and may come back
    on another number of ranks. Everything else is saved by rank 0 alone; a sampler with a state by every rank.
    """

    def __init__(self, *, model: torch.nn.Module, sampler: Any = None, **objects: Any) -> None:
        """Create it when the objects are complete: wrapped, sharded, on their device.

        Args:
            model: The weights; also written to ``final/`` at the end.
            sampler: Its ``set_epoch`` is called with each epoch. One that has a state is saved too.
            objects: ``optimizer``, ``scheduler``, ``scaler``, ``ema``, …: their names are those of the files.

        Raises:
            TypeError: An object has no state.
        """
        super().__init__({"model": model} | objects, sampler)

    def _write_final(self, folder: Path) -> None:
        self._write_objects({"model": self._objects["model"]}, folder)
