"""Lightning, under both of its package names: a callback that saves, stops in time and continues at the same batch.

```python
from trainer_hook.lightning import checkpointer

trainer = Trainer(callbacks=[checkpointer()])
```

Under ``CKPT_HOOK=auto`` every ``Trainer`` gets it (``activate``).

Random state and the position in the data are added to Lightning's own checkpoint. It is saved only where Lightning's loops
continue exactly: after a batch that ended with an optimizer step and the validation that followed it, and between epochs.
A just-in-time save does not wait for a validation: the resumed run repeats it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

from trainer_hook.libraries.lightning_fit import Fit
from trainer_hook.process.log import warn
from trainer_hook.process.patching import replaced, surrounded
from trainer_hook.process.session import session_from_environment

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def activate(_: Any = None) -> None:
    """Have every ``Trainer`` of the imported packages use the callback. May be repeated."""
    for name in PACKAGES:
        package = sys.modules.get(name)
        if package is not None and not hasattr(package.Trainer.fit, "__wrapped__"):
            _wrap_fit(package)


def _wrap_fit(package: Any) -> None:
    original = package.Trainer.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.fast_dev_run and not any(hasattr(callback, "checkpoint_fit") for callback in self.callbacks):
            try:
                self.callbacks.append(checkpointer(package))
            except (OSError, ValueError) as error:  # the script did not ask for the hook
                warn(f"the hook is off: {error}")
        return original(self, *args, **kwargs)

    package.Trainer.fit = fit


def checkpointer(package: Any = None) -> Any:
    """Return the callback.

    ``package``: ``lightning.pytorch`` or ``pytorch_lightning``, or its name; by default the one that is imported.

    Raises:
        ImportError: Neither is imported.
    """
    if isinstance(package, str):
        package = importlib.import_module(package)
    package = package or next((sys.modules[name] for name in PACKAGES if name in sys.modules), None)
    if package is None:
        raise ImportError("import lightning or pytorch_lightning before the checkpointer is made")
    session_from_environment()  # listens for signals from now on
    return _callback_class(package)()


class _Checkpointer:
    """One ``fit()`` at a time: it is set up when the ranks know each other, before Lightning loads a checkpoint."""

    package_name: str

    def __init__(self) -> None:
        self.checkpoint_fit: Fit | None = None
        self._undo = contextlib.ExitStack()

    def __reduce__(self) -> Any:  # strategies that spawn pickle their callbacks
        return checkpointer, (self.package_name,)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        tuning = any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)
        session = session_from_environment() if stage == "fit" and not tuning else None
        if session is None or session.is_inner_call():
            return
        self.checkpoint_fit = fit = Fit(session, trainer)
        with contextlib.ExitStack() as undo:
            _install(fit, undo)
            self._undo = undo.pop_all()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.checkpoint_fit is not None:
            self.checkpoint_fit.in_validation()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        fit, self.checkpoint_fit = self.checkpoint_fit, None
        with self._undo:
            if fit is not None:
                fit.call.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        fit = self.checkpoint_fit
        try:
            if fit is not None:
                fit.failed(exception)
        except SystemExit:  # after a just-in-time save: of what Lightning does next nothing runs
            _finalize_loggers(trainer)
            raise
        finally:
            self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.checkpoint_fit = None
        self._undo.close()


def _finalize_loggers(trainer: Any) -> None:
    """Have loggers write what they hold, as Lightning does after an error. The exit of a preempted process limits the time."""
    for logger in trainer.loggers:
        try:
            logger.finalize("failed")
        except Exception as error:
            warn(f"{type(logger).__name__} could not be finalized ({type(error).__name__}: {error})")


@functools.cache
def _callback_class(package: Any) -> type:
    _watch_data(package)
    return type("Checkpointer", (_Checkpointer, package.Callback), {"package_name": package.__name__})


_fits: list[Fit] = []
"""The running ``fit()``."""


def _watch_data(package: Any) -> None:
    """Have the passes over the training data begin at the batch of ``Fit.batches``."""
    fetcher = sys.modules[f"{package.__name__}.loops.fetchers"]._DataFetcher
    original = fetcher.__iter__

    def iterate(self: Any) -> Any:
        if not _fits or self._combined_loader is not _fits[-1].trainer.fit_loop._combined_loader:
            return original(self)
        self.iterator = _fits[-1].batches(self.combined_loader)
        self.reset()
        return self

    fetcher.__iter__ = iterate


def _install(fit: Fit, undo: contextlib.ExitStack) -> None:
    """Follow one ``fit()`` through the methods of its loops; ``undo`` removes all of it."""
    trainer = fit.trainer
    loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    undo.callback(fit.call.close)
    _fits.append(fit)
    undo.callback(_fits.remove, fit)
    connector = trainer._checkpoint_connector
    for patch in (
        replaced(connector, "_restore_modules_and_callbacks", _restore(fit, connector._restore_modules_and_callbacks)),
        surrounded(connector, "restore_training_state", after=fit.restored),
        surrounded(loop, "on_advance_start", before=fit.before_epoch),
        replaced(epoch_loop, "on_run_start", _around_pass(fit, epoch_loop.on_run_start)),
        surrounded(epoch_loop, "on_advance_end", after=fit.after_batch),
        surrounded(epoch_loop.val_loop, "run", during=fit.validation),
        surrounded(loop, "on_advance_end", after=fit.after_epoch),
        surrounded(loop, "on_run_end", after=fit.call.finish),
        # Lightning's own handler broadcasts inside a signal handler, which hangs, and ends training without a checkpoint.
        replaced(trainer._signal_connector, "_sigterm_notifier_fn", lambda *_: None),
    ):
        undo.enter_context(patch)


def _around_pass(fit: Fit, original: Any) -> Any:
    def on_run_start(data_fetcher: Any, *args: Any, **kwargs: Any) -> Any:
        fit.before_pass(data_fetcher)
        result = original(data_fetcher, *args, **kwargs)
        fit.in_pass(data_fetcher)
        return result

    return on_run_start


def _restore(fit: Fit, original: Any) -> Any:
    """Have Lightning load the checkpoint that ``Fit.choose`` returns instead of the script's."""

    def restore(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = fit.choose(checkpoint_path)
        if not isinstance(path, Path):
            return original(checkpoint_path if fit.call.script_choice_stands else None, *args, **kwargs)
        try:
            return original(str(path), *args, **kwargs)
        except pickle.UnpicklingError:
            # Hyperparameters may be of any class. This run's own trainer wrote the file, and its checksum was verified.
            return original(str(path), weights_only=False)

    return restore
