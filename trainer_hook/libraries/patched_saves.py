"""Watches the calls by which scripts save with ``torch.distributed.checkpoint`` and DeepSpeed.

The calls do what they did. A session is opened at the first save to the volume.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook.libraries.script_saves import SaveCall, expected, published, published_elsewhere

COMPLETE_ON_RETURN = frozenset({"TorchCheckpointEngine", "FastCheckpointEngine"})
"""DeepSpeed's synchronous writers: ``save_checkpoint`` returns when all is written."""


def patch_dcp(package: Any) -> None:
    """Watch ``save``, ``save_state_dict`` and ``async_save`` of an imported ``torch.distributed.checkpoint``.

    All of them call ``_save_state_dict``, in any thread. ``async_save`` with a process does so in that process: the process
    that called ``async_save`` publishes it.
    """
    saver: Any = sys.modules[f"{package.__name__}.state_dict_saver"]
    if hasattr(saver._save_state_dict, "__wrapped__"):
        return
    saver._save_state_dict = _inside(published, saver._save_state_dict)
    saver.async_save = package.async_save = _inside(expected, saver.async_save)
    executor: Any = sys.modules.get(f"{package.__name__}._async_process_executor")
    if executor is not None:
        process = executor._AsyncCheckpointProcess
        process.save = _inside(published, process.save)
        process._execute_save = staticmethod(_inside(published_elsewhere, process._execute_save))


def _inside(surrounding: Callable[[Callable[[], SaveCall]], contextlib.AbstractContextManager[None]], save: Any) -> Any:
    signature = inspect.signature(save)

    @functools.wraps(save)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with surrounding(lambda: _dcp_call(signature.bind(*args, **kwargs).arguments)):
            return save(*args, **kwargs)

    return inside


def _dcp_call(arguments: dict[str, Any]) -> SaveCall:
    folder = arguments.get("checkpoint_id")
    if folder is None:
        folder = getattr(arguments.get("storage_writer"), "path", None)
    alone = bool(arguments.get("no_dist"))
    talks = alone or arguments.get("use_collectives", True)
    return SaveCall(
        folder,
        lambda: _ranks(arguments.get("process_group"), alone=alone),
        "" if talks else "with use_collectives=False its ranks do not wait for each other",
    )


def _ranks(group: Any, *, alone: bool) -> tuple[int, ...]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    return (dist.get_rank(),) if alone else tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def patch_deepspeed(engine_module: Any) -> None:
    """Watch ``save_checkpoint`` of an imported ``deepspeed.runtime.engine``. Its directory is the tag."""
    engine = engine_module.DeepSpeedEngine
    original = engine.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(self: Any, save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        def call() -> SaveCall:
            folder = Path(save_dir, str(tag) if tag is not None else f"global_step{self.global_steps}")
            writer = type(self.checkpoint_engine).__name__
            unknown = "" if writer in COMPLETE_ON_RETURN else f"{writer} may still write when save_checkpoint returns"
            return SaveCall(folder, lambda: _ranks(None, alone=False), unknown)

        with published(call):
            return original(self, save_dir, tag, *args, **kwargs)

    if not hasattr(original, "__wrapped__"):
        engine.save_checkpoint = save_checkpoint
