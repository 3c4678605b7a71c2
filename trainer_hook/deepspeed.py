"""DeepSpeed: a training loop that saves, stops in time and continues at the same batch.

```python
from trainer_hook.deepspeed import Checkpointer

engine, _, _, _ = deepspeed.initialize(model=model, config=config)
with Checkpointer(engine) as ckpt:
    for epoch in ckpt.epochs(3):
        for batch in ckpt.steps(loader):
            engine.backward(engine(batch))
            engine.step()
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_hook.loops.loop import Loop
from trainer_hook.loops.state_files import StateMismatch

__all__ = ["Checkpointer"]

TAG = "deepspeed"


class Checkpointer(Loop):
    """Saves by ``engine.save_checkpoint`` and restores by ``load_checkpoint``; adds random state and data position."""

    def __init__(self, engine: Any, *, sampler: Any = None, **objects: Any) -> None:
        """Create it after ``deepspeed.initialize``.

        Args:
            engine: Its model, optimizer and scheduler are saved. DeepSpeed reads its own files with ``weights_only=False``.
            sampler: As for ``trainer_hook.torch.Checkpointer``.
            objects: Further objects to save, by name.
        """
        super().__init__(objects, sampler)
        self._engine = engine

    def _write(self, folder: Path) -> None:
        (folder / TAG).mkdir(exist_ok=True)  # on every node: DeepSpeed makes it only on that of rank 0
        self._engine.save_checkpoint(str(folder), tag=TAG)
        super()._write(folder)

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise StateMismatch(f"{folder.name}: DeepSpeed finds nothing to load in {TAG}/; its own log says why")
        super()._load(folder, progress)

    def _write_final(self, folder: Path) -> None:
        if not self._engine.save_16bit_model(str(folder), "model.pt"):
            raise RuntimeError("ZeRO 3 gathers the model only with stage3_gather_16bit_weights_on_model_save")

    def _reads_all(self) -> bool:
        engine = self._engine
        return bool(engine.zero_elastic_checkpoint() or engine.load_universal_checkpoint() or super()._reads_all())

    def _obstacle(self) -> str | None:
        # Its ranks write partitions of one state through its own writers, some of which are asynchronous themselves.
        return "DeepSpeed, whose own writers save"

    def _stepped(self, accumulate: int) -> bool:
        return bool(self._engine.micro_steps % self._engine.gradient_accumulation_steps() == 0)
