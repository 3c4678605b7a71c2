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

from pathlib import Path
from typing import Any

import torch

from trainer_hook.loops.loop import Loop

__all__ = ["Checkpointer"]


class Checkpointer(Loop):
    """Saves and restores objects that have ``state_dict`` and ``load_state_dict``; random state; the position in the data.

    Sharded models (``fully_shard``, FSDP) and their optimizers go through ``torch.distributed.checkpoint`` and may come back
    on another number of ranks. Everything else is saved by rank 0 alone; a sampler with a state by every rank.
    """

    def __init__(self, *, model: torch.nn.Module, sampler: Any = None, **objects: Any) -> None:
        """Create it when the objects are complete: wrapped, sharded, on their device.

        Args:
            model: The weights; also written to ``final/`` at the end.
            sampler: Its ``set_epoch`` is called with each epoch. Its state is saved, if it has one.
            objects: ``optimizer``, ``scheduler``, ``scaler``, ``ema``, …; the names become those of the files.

        Raises:
            TypeError: An object has no state.
        """
        super().__init__({"model": model} | objects, sampler)

    def _write_final(self, folder: Path) -> None:
        self._write_objects({"model": self._objects["model"]}, folder)
