"""Hugging Face Accelerate: a training loop that saves, stops in time and continues at the same batch.

```python
from trainer_hook.accelerate import Checkpointer

model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
with Checkpointer(accelerator) as ckpt:
    for epoch in ckpt.epochs(3):
        for batch in ckpt.steps(loader):
            with accelerator.accumulate(model):
                ...
```
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_hook.loops import state_files
from trainer_hook.loops.loop import Loop
from trainer_hook.saving.async_save import WHOLE_STATE_ON_ONE_RANK
from trainer_hook.saving.readable import Load, checked, unreadable

__all__ = ["Checkpointer"]


class Checkpointer(Loop):
    """Saves by ``accelerator.save_state`` and restores by ``load_state``; adds random state and position in the data."""

    def __init__(self, accelerator: Any, *, sampler: Any = None, **objects: Any) -> None:
        """Create it after ``accelerator.prepare``.

        Args:
            accelerator: Its prepared and registered objects are saved. (It reads registered objects with
                ``weights_only=False``; those in ``objects`` are read without running code.)
            sampler: As for ``trainer_hook.torch.Checkpointer``.
            objects: Further objects to save, by name.
        """
        super().__init__(objects, sampler)
        self._accelerator = accelerator

    def _write(self, folder: Path) -> None:
        fits = all(map(state_files.fits_safetensors, self._accelerator._models))
        with self._naming_off(), checked(folder, _load_of):
            self._accelerator.save_state(str(folder), safe_serialization=fits)
        super()._write(folder)

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        self._accelerator.load_state(str(folder))
        super()._load(folder, progress)

    def _unreadable(self) -> list[str]:
        accelerator, own = self._accelerator, super()._unreadable()
        if self._obstacle() is not None or not accelerator.is_main_process:
            return own
        states = [("optimizer", each) for each in accelerator._optimizers]
        states += [("scheduler", each) for each in accelerator._schedulers]
        return own + unreadable((name, each.state_dict, _load) for name, each in states)

    def _write_final(self, folder: Path) -> None:
        for number, model in enumerate(self._accelerator._models):
            place, fits = folder if number == 0 else folder / f"model_{number}", state_files.fits_safetensors(model)
            self._accelerator.save_model(model, str(place), safe_serialization=fits)

    def _obstacle(self) -> str | None:
        kind = str(getattr(self._accelerator.distributed_type, "value", self._accelerator.distributed_type))
        return None if kind in WHOLE_STATE_ON_ONE_RANK else kind

    def _large_objects(self) -> Sequence[Any]:
        prepared = [*self._accelerator._models, *self._accelerator._optimizers] if self._accelerator.is_main_process else []
        return [*prepared, *super()._large_objects()]

    def _stepped(self, accumulate: int) -> bool:
        return bool(self._accelerator.sync_gradients)

    @contextlib.contextmanager
    def _naming_off(self) -> Iterator[None]:
        """Switch automatic naming off: it would save below ``project_dir``, and count and delete there."""
        configuration = self._accelerator.project_configuration
        before = configuration.automatic_checkpoint_naming, configuration.iteration
        configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            configuration.automatic_checkpoint_naming, configuration.iteration = before


def _load_of(name: str) -> Load | None:
    """Return ``load_state``'s reader; registered objects may be of any class, and random states are accelerate's own."""
    return _load if name.endswith(".bin") or name == "scaler.pt" else None


def _load(file: Any) -> Any:
    from accelerate import utils

    if (load := getattr(utils, "load", None)) is None:  # accelerate 1.0 reads with torch.load as it is
        import torch

        load = torch.load
    return load(file, map_location="cpu")
