"""Activates the hook when a supported library is imported. An error here never breaks an interpreter."""

from __future__ import annotations

# Every Python in the container imports this module: no import that costs time, such as importlib.abc or typing.
import os
import sys

from trainer_hook.process import main_thread
from trainer_hook.process.log import warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

RUN_PID = "CHECKPOINT_HOOK_RUN_PID"
"""Process that ``trainer_hook run`` became: if it is a Python script that saves nothing, it says so."""
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds after SIGTERM until torchrun kills its workers; read since torch 2.12, fixed to 30 s before."""


_PATCHES = {
    "transformers.trainer": ("libraries.transformers.trainer", "activate"),
    "accelerate.commands.launch": ("activation.launcher_patches", "patch_accelerate"),
    "deepspeed.launcher.runner": ("activation.launcher_patches", "patch_deepspeed"),
    "torch.distributed.launcher.api": ("activation.launcher_patches", "patch_torchrun"),
    "lightning.pytorch": ("lightning", "activate"),
    "pytorch_lightning": ("lightning", "activate"),
    "torch.distributed.checkpoint": ("libraries.patched_saves", "patch_dcp"),
    "accelerate.accelerator": ("libraries.patched_saves", "patch_accelerate"),
    "deepspeed.runtime.engine": ("libraries.patched_saves", "patch_deepspeed"),
    "torch.optim.optimizer": ("activation.unused", "watch_training"),
}
"""By imported module: the module below ``trainer_hook`` and its function, which is called with the imported module."""


_COMMANDS = ("accelerate.commands.launch", "deepspeed.launcher.runner")
"""Those of them that ``python -m`` may run: as ``__main__`` they are not imported."""


class _Finder:
    """Leaves the search to the other finders, and wraps the loader of a module in ``_PATCHES``."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    _wrap(spec.loader, *_PATCHES[name])
                    if name in _COMMANDS:
                        _run_imported(spec.loader, name)
                return spec
        return None


def _wrap(loader: Any, patching_module: str, function: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            patching: Any = __import__(f"trainer_hook.{patching_module}", fromlist=[function])
            getattr(patching, function)(module)
        except Exception as error:
            warn(f"the hook is off: {type(error).__name__}: {error}")

    loader.exec_module = exec_module


def _run_imported(loader: Any, name: str) -> None:
    get_code = loader.get_code

    def code(wanted: str) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != "runpy":
            return get_code(wanted)
        return compile(f"from {name} import main\nmain()\n", f"<{name}>", "exec")

    loader.get_code = code


def activate() -> None:
    """Begin to watch imports. May be repeated."""
    if os.getpid() == 1:
        from trainer_hook.process.pid_one import end_by_sigterm

        end_by_sigterm()
    if not any(type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        main_thread.listen()
        if os.environ.get(RUN_PID) == str(os.getpid()):
            from trainer_hook.activation.unused import watch

            watch()
        give_workers_the_grace_period(os.environ)


def give_workers_the_grace_period(environ: MutableMapping[str, str]) -> None:
    """Have torchrun wait for the grace period before it kills its workers, unless the user set another time."""
    if not environ.get(SHUTDOWN_TIMEOUT):
        try:
            environ[SHUTDOWN_TIMEOUT] = str(-int(-float(environ.get("CKPT_GRACE_SECONDS") or 30) // 1))
        except (ValueError, OverflowError):  # reported when the settings are read
            return
