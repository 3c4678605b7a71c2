"""Workers of the evaluation's loader that persist (``dataloader_persistent_workers``), in a run that resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from trainer_hook.libraries.transformers.checkpoint_files import read_state
from trainer_hook.libraries.transformers.step_tail import EVALUATE, unfinished_of
from trainer_hook.process.patching import replaced
from trainer_hook.resuming.resumer import Choice


def has_evaluated(state: Mapping[str, Any], meta: Mapping[str, Any]) -> bool:
    """Whether an evaluation had ended before a checkpoint. ``state``: its ``trainer_state.json``; ``meta``: of its marker."""
    repeated = state.get("global_step") if EVALUATE in unfinished_of(meta) else None
    history = [entry for entry in state.get("log_history") or () if entry.get("step") != repeated]
    return any(name.startswith("eval_") for entry in history for name in entry)


def seeded_before(trainer: Any, choice: Choice) -> contextlib.AbstractContextManager[None]:
    """Have new workers draw no seed from training's generator where an earlier process drew it, at its first evaluation."""
    original = trainer.get_eval_dataloader
    if not has_evaluated(read_state(choice.path), choice.meta):
        return contextlib.nullcontext()
    import torch

    def get_eval_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = original(*args, **kwargs)
        if any(loader is kept for kept in getattr(trainer, "_eval_dataloaders", {}).values()):
            getattr(loader, "base_dataloader", loader).generator = torch.Generator()
        return loader

    return replaced(trainer, "get_eval_dataloader", get_eval_dataloader)
