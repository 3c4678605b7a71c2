"""Lightning continues exactly also with state that its own checkpoint lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hook.job import finished
from tests.hook.versions import installed
from tests.lazy import LazyModule

if TYPE_CHECKING:
    import torch

    from tests.hook.loops import short_trainings as trainings
else:
    torch, trainings = map(LazyModule, ("torch", "tests.hook.loops.short_trainings"))

pytestmark = pytest.mark.slow
RELOADS_EXACTLY = pytest.mark.skipif(installed("lightning") < (2, 5), reason="Lightning 2.4 shuffles otherwise after a resume")
PLATEAU_OF_MORE_GROUPS = pytest.mark.skipif(installed("torch") < (2, 6), reason="ReduceLROnPlateau takes no further group")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
PER_EPOCH = 6


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    pytest.importorskip("lightning.pytorch")
    trainings.imported_once()


def module(stop_at: int | None, *, monitor: str = "loss", in_validation: bool = False) -> Any:
    """Return a module that is stopped after a step, or, with ``in_validation``, in the validation after it."""
    import lightning.pytorch as pl
    from torchmetrics import MeanMetric, MetricCollection

    from trainer_hook.lightning import activate

    activate()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = trainings.Net()
            self.metrics = MetricCollection({"one": MeanMetric(), "other": MeanMetric()})

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            torch.rand(1)
            if not in_validation:
                trainings.terminate_at(self.global_step + 1, stop_at)
            loss: torch.Tensor = self.net(batch).pow(2).mean()
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.metrics.update(loss.detach())
            self.log_dict(self.metrics, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            if in_validation and not self.trainer.sanity_checking:
                trainings.terminate_at(self.global_step, stop_at)

        def configure_optimizers(self) -> Any:
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=1e-2)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.6)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": monitor}}

    return Module()


def fitted(model: Any, rows: Any = None, **arguments: Any) -> list[float]:
    import lightning.pytorch as pl

    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=3, **QUIET, **arguments)
    rows = trainings.Rows() if rows is None else rows
    shuffle = hasattr(rows, "__len__")
    loader = torch.utils.data.DataLoader(rows, batch_size=trainings.BATCH, shuffle=shuffle)
    trainer.fit(model, loader, torch.utils.data.DataLoader(trainings.Rows(), batch_size=trainings.BATCH))
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return trainings.digest(model) + rates


def by_the_loss_of_the_epoch(stop_at: int | None) -> list[float]:
    return fitted(module(stop_at))


def by_a_metric_of_the_epoch(stop_at: int | None) -> list[float]:
    return fitted(module(stop_at, monitor="other"))


def with_a_stream(stop_at: int | None) -> list[float]:
    return fitted(module(stop_at), trainings.Stream())


def reloading(stop_at: int | None) -> list[float]:
    return fitted(module(stop_at), reload_dataloaders_every_n_epochs=1, limit_val_batches=0)


def unfreezing(stop_at: int | None) -> list[float]:
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezing(BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-3)

    return fitted(module(stop_at), callbacks=[Unfreezing()])


def averaging(stop_at: int | None) -> list[float]:
    """The validation, in which SIGTERM comes, runs with the average of the weights."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return fitted(module(stop_at, in_validation=True), callbacks=[EMAWeightAveraging(decay=0.5)])


def with_a_last_epoch_that_trains_nothing(stop_at: int | None) -> list[float]:
    """SIGTERM comes in its validation. Lightning cannot resume there: each try had ended with an error."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return fitted(module(stop_at, in_validation=True), callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)])


@pytest.mark.parametrize(
    ("training", "stops"),
    [
        (by_the_loss_of_the_epoch, (4, PER_EPOCH + 3)),
        (by_a_metric_of_the_epoch, (4, PER_EPOCH + 3)),
        (with_a_stream, (4, PER_EPOCH + 2)),
        pytest.param(reloading, (PER_EPOCH, PER_EPOCH + 2), marks=RELOADS_EXACTLY),
        pytest.param(unfreezing, (PER_EPOCH + 1, 2 * PER_EPOCH + 3), marks=PLATEAU_OF_MORE_GROUPS),
        (averaging, (PER_EPOCH,)),
        (with_a_last_epoch_that_trains_nothing, (3 * PER_EPOCH + 1,)),
    ],
)
def test_a_fit_that_is_stopped_anywhere_ends_as_if_it_was_not(
    training: Callable[[int | None], list[float]], stops: tuple[int, ...], environ: dict[str, str], volume: Path
) -> None:
    if training is averaging:
        pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    code, expected = trainings.life(training, None, {"CKPT_DIR": ""})
    assert (code, bool(expected)) == (0, True)
    for stop_at in stops:
        assert trainings.life(training, stop_at, environ)[0] == 143
    assert len(finished(volume)) == len(stops)
    assert trainings.life(training, None, environ) == (0, expected)
