"""Watches the calls by which scripts save with ``torch.distributed.checkpoint``, DeepSpeed and Accelerate.

The calls do what they did. A session is opened at the first save to the volume. ``Accelerator()`` also waits for the checkpoint
that the script looks for next.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer_hook.libraries.callers import is_called_from
from trainer_hook.libraries.script_saves import SaveCall, expected, published, published_elsewhere
from trainer_hook.process.log import warn
from trainer_hook.resuming.script_resume import await_download
from trainer_hook.saving.async_save import WHOLE_STATE_ON_ONE_RANK

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
            return SaveCall(folder, lambda: _ranks(None, alone=False), _still_writing([self]))

        with published(call):
            return original(self, save_dir, tag, *args, **kwargs)

    if not hasattr(original, "__wrapped__"):
        engine.save_checkpoint = save_checkpoint


def _still_writing(engines: Sequence[Any]) -> str:
    """Return why a save of DeepSpeed's engines may not be over when the call returns; empty: it is."""
    writers = [type(engine.checkpoint_engine).__name__ for engine in engines]
    late = next((writer for writer in writers if writer not in COMPLETE_ON_RETURN), None)
    return f"{late} may still write when save_checkpoint returns" if late else ""


def patch_accelerate(accelerator_module: Any) -> None:
    """Watch ``save_state`` of an imported ``accelerate.accelerator``. What it calls to save its parts publishes nothing.

    A loop of the script's own looks for its checkpoint after it made an ``Accelerator``, which waits for the download.
    """
    accelerator = accelerator_module.Accelerator
    original, initialize = accelerator.save_state, accelerator.__init__

    @functools.wraps(original)
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        def call() -> SaveCall:
            return _accelerate_call(self, output_dir)

        with published(call), published_elsewhere(call):
            return original(self, output_dir, *args, **kwargs)

    @functools.wraps(initialize)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_resumed_by_a_driver():
            try:
                await_download()
            except Exception as error:
                warn(f"the download of a checkpoint is not waited for: {type(error).__name__}: {error}")
        initialize(self, *args, **kwargs)

    if not hasattr(original, "__wrapped__"):
        accelerator.save_state, accelerator.__init__ = save_state, init


def _is_resumed_by_a_driver() -> bool:
    """Whether the hook resumes the training of this call: a Trainer's, or a loop's that uses ``trainer_hook.accelerate``."""
    return "trainer_hook.accelerate" in sys.modules or is_called_from("transformers.")


def _accelerate_call(accelerator: Any, folder: Any) -> SaveCall:
    """Describe a call of ``save_state``.

    Where one process has the whole state, scripts call it in that one or in all: the others add at most their random state,
    so the main process publishes. Where the state is in parts, all ranks make the call.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        folder = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in WHOLE_STATE_ON_ONE_RANK:
        return SaveCall(folder if accelerator.is_main_process else None, lambda: _ranks(None, alone=True))
    if kind == "DEEPSPEED":
        return SaveCall(folder, lambda: _ranks(None, alone=False), _still_writing(accelerator._models))
    unknown = "" if kind == "FSDP" else f"the end of a save with {kind} is not known"
    return SaveCall(folder, lambda: _ranks(None, alone=False), unknown)
