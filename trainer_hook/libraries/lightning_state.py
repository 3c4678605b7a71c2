"""The state of a Lightning training that Lightning's own checkpoint lacks; each rank has its own.

The results of ``self.log`` in an unfinished epoch and the states of the module's metrics: their values at the end of the epoch
decide about schedulers, early stopping and the best model. Which parameters are trained: a callback may have unfrozen some in
an earlier epoch. The epoch in which the training data was loaded last, for ``reload_dataloaders_every_n_epochs``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainer_hook.process.patching import replaced

_VALUES = ("value", "cumulated_batch_size")
"""The states of a result of Lightning: the sum, or another reduction, and the number of samples."""


def read(trainer: Any) -> dict[str, Any]:
    """Return a copy of this rank's state, on the CPU."""
    results = {
        key: {name: _copied(vars(result)[name]) for name in _VALUES if name in vars(result)}
        for key, result in trainer.fit_loop.epoch_loop._results.items()
        if result.is_tensor and result.meta.on_epoch and not result.has_reset
    }
    return {
        "results": results,
        "metrics": {name: _state_of(metric) for name, metric in _metrics(trainer)},
        "is_trained": {name: value.requires_grad for name, value in trainer.lightning_module.named_parameters()},
        "loaded_in_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
    }


def restore(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Set the state to that of ``read``, but for the results."""
    for name, metric in _metrics(trainer):
        for state, value in saved.get("metrics", {}).get(name, {}).items():
            setattr(metric, state, _copied(value, metric.device))
        metric._computed = None
    for name, parameter in trainer.lightning_module.named_parameters():
        parameter.requires_grad_(saved.get("is_trained", {}).get(name, parameter.requires_grad))
    if "loaded_in_epoch" in saved:
        trainer.fit_loop._last_train_dl_reload_epoch = saved["loaded_in_epoch"]


@contextlib.contextmanager
def results_continued(trainer: Any, state: Mapping[str, Any]) -> Iterator[None]:
    """Have each result of the rest of the epoch begin with its values of ``read``, when the module logs it again."""
    results, saved = trainer.fit_loop.epoch_loop._results, dict(state.get("results", {}))
    original = results.update_metrics

    def begin(key: str) -> None:
        for name, value in saved.pop(key, {}).items():
            setattr(results[key], name, value.to(results[key].value.device))

    def update_metrics(key: str, *args: Any, **kwargs: Any) -> None:
        begin(key)
        original(key, *args, **kwargs)

    for key in [key for key in saved if key in results]:  # the resumed run has logged it at the start of the epoch
        begin(key)
    with replaced(results, "update_metrics", update_metrics):
        yield


def _metrics(trainer: Any) -> list[tuple[str, Any]]:
    from torchmetrics import Metric, MetricCollection

    modules = list(trainer.lightning_module.named_modules())
    for _, collection in modules:
        if isinstance(collection, MetricCollection):
            collection.items(copy_state=False)  # metrics that share a state have it from now on
    return [(name, module) for name, module in modules if isinstance(module, Metric)]


def _state_of(metric: Any) -> dict[str, Any]:
    return {name: _copied(getattr(metric, name)) for name in (*metric._defaults, "_update_count")}


def _copied(value: Any, device: Any = "cpu") -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    return [_copied(part, device) for part in value] if isinstance(value, list) else value
