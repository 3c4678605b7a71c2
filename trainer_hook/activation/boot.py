"""Activates the hook when a library that it knows is imported, and not before. An error here never breaks an interpreter."""

from __future__ import annotations

# Every Python in the container imports this module: nothing that costs time, importlib.abc and typing least of all.
import os
import sys

from trainer_hook.process import main_thread
from trainer_hook.process.log import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun kills its workers so many seconds after SIGTERM; it reads the variable since 2.12, older ones know only 30 s."""


def _on_transformers_trainer(module: Any) -> None:
    from trainer_hook.libraries.transformers import trainer as transformers
    from trainer_hook.process.session import current_session

    if not _is_helper():
        current_session()  # hears signals from now on, before the first train()
    transformers.patch(module, current_session)


def _is_helper() -> bool:
    """Whether multiprocessing started this interpreter: a DataLoader's worker, which nothing must change, or a rank.

    A rank tells itself apart when it calls ``train()``.
    """
    process = sys.modules.get("multiprocessing.process")
    return process is not None and (process.parent_process() is not None or hasattr(process.current_process(), "_inheriting"))


def _on_accelerate_launch(module: Any) -> None:
    from trainer_hook.activation import launcher_patches

    launcher_patches.patch_accelerate(module)


def _on_deepspeed_runner(module: Any) -> None:
    from trainer_hook.activation import launcher_patches

    launcher_patches.patch_deepspeed(module)


def _on_lightning(module: Any) -> None:
    from trainer_hook import lightning

    lightning.activate()


def _on_dcp(module: Any) -> None:
    from trainer_hook.libraries import patched_saves

    patched_saves.patch_dcp(module)


def _on_deepspeed(module: Any) -> None:
    from trainer_hook.libraries import patched_saves

    patched_saves.patch_deepspeed(module)


WATCHED: dict[str, Callable[[Any], None]] = {
    "transformers.trainer": _on_transformers_trainer,
    "accelerate.commands.launch": _on_accelerate_launch,
    "deepspeed.launcher.runner": _on_deepspeed_runner,
    "lightning.pytorch": _on_lightning,
    "pytorch_lightning": _on_lightning,
    "torch.distributed.checkpoint": _on_dcp,
    "deepspeed.runtime.engine": _on_deepspeed,
}


class _Finder:
    """Finds nothing itself: lets the others find, and wraps the loader of a watched module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    _wrap(spec.loader, WATCHED[name])
                return spec
        return None


def _wrap(loader: Any, then: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            then(module)
        except Exception as error:
            warn(f"the hook is off: {type(error).__name__}: {error}")

    loader.exec_module = exec_module


def activate() -> None:
    """Begin to watch imports. Doing it again changes nothing."""
    if os.getpid() == 1:
        from trainer_hook.process.pid_one import end_by_sigterm

        end_by_sigterm()
    if not any(type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        main_thread.listen()
        give_workers_the_grace_period(os.environ)


def give_workers_the_grace_period(environ: MutableMapping[str, str]) -> None:
    """Have torchrun kill its workers that long after SIGTERM, unless it was told otherwise."""
    if not environ.get(SHUTDOWN_TIMEOUT):
        try:
            environ[SHUTDOWN_TIMEOUT] = str(-int(-float(environ.get("CKPT_GRACE_SECONDS") or 30) // 1))
        except (ValueError, OverflowError):  # said when the settings are read
            return
