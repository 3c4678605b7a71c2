"""Short trainings by each loop that is continued exactly. They end with their weights, and can send SIGTERM to themselves."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer_hook.torch import Checkpointer

FORK = multiprocessing.get_context("fork")
ROWS, BATCH, EPOCHS = 24, 4, 3
PER_EPOCH = ROWS // BATCH


class Rows(Dataset[Any]):
    """Rows to which python's, numpy's and torch's global generators add noise."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + torch.rand(4) + random.random() + np.random.rand()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (torch.full((4,), float(index)) + torch.rand(4) for index in range(ROWS))


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def terminate_at(step: int, stop_at: int | None) -> None:
    if step == stop_at:
        os.kill(os.getpid(), signal.SIGTERM)


def digest(model: torch.nn.Module) -> list[float]:
    return [number for tensor in model.state_dict().values() for number in tensor.double().flatten().tolist()]


class Training:
    """What the plain loops have in common."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at = stop_at
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)

    def learn(self, batch: torch.Tensor, ckpt: Checkpointer, *, steps: bool = True) -> None:
        self.model(batch).pow(2).mean().backward()
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()
            terminate_at(ckpt.global_step + 1, self.stop_at)

    def checkpointer(self, **more: Any) -> Checkpointer:
        return Checkpointer(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, **more)


def with_epochs(loader: Any, stop_at: int | None) -> list[float]:
    training = Training(stop_at)
    with training.checkpointer() as ckpt:
        for _ in ckpt.epochs(EPOCHS):
            for batch in ckpt.steps(loader):
                training.learn(batch, ckpt)
            training.scheduler.step()
            torch.rand(3)  # as an evaluation may
    return digest(training.model)


def shuffled(stop_at: int | None) -> list[float]:
    return with_epochs(DataLoader(Rows(), batch_size=BATCH, shuffle=True), stop_at)


def hard_to_save(stop_at: int | None) -> list[float]:
    """numpy's numbers in scheduler and optimizer, and a buffer of a type that safetensors does not have."""
    training = Training(stop_at)
    training.model.register_buffer("angles", torch.ones(2, dtype=torch.complex128))
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: np.cos(step / 9))
    with training.checkpointer() as ckpt:
        for batch in ckpt.steps(DataLoader(Rows(), batch_size=BATCH, shuffle=True), epochs=EPOCHS):
            training.learn(batch, ckpt)
            training.scheduler.step()
            training.model.angles.mul_(1j)
    return digest(training.model.register_buffer("angles", torch.view_as_real(training.model.angles)) or training.model)


def killed_in_its_end(stop_at: int | None) -> list[float]:
    with patch.object(Checkpointer, "_write_final", lambda *_: os._exit(9)):
        return shuffled(stop_at)


def shuffled_by_its_own_generator(stop_at: int | None) -> list[float]:
    return with_epochs(DataLoader(Rows(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(4)), stop_at)


def with_workers(stop_at: int | None) -> list[float]:
    return with_epochs(DataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=2), stop_at)


def with_persistent_workers(stop_at: int | None) -> list[float]:
    rows: Any = [torch.full((4,), float(index)) for index in range(ROWS)]  # what the workers draw themselves is not saved
    return with_epochs(DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=True), stop_at)


def streamed(stop_at: int | None) -> list[float]:
    return with_epochs(DataLoader(Stream(), batch_size=BATCH), stop_at)


def stateful(stop_at: int | None) -> list[float]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return with_epochs(StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True), stop_at)


def by_steps_alone(stop_at: int | None) -> list[float]:
    training, loader = Training(stop_at), DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    with training.checkpointer() as ckpt:
        for batch in ckpt.steps(loader, max_steps=EPOCHS * PER_EPOCH):
            training.learn(batch, ckpt)
    return digest(training.model)


def accumulating(stop_at: int | None) -> list[float]:
    training, loader = Training(stop_at), DataLoader(Rows(), batch_size=BATCH // 2, shuffle=True)
    with training.checkpointer() as ckpt:
        for batch in ckpt.steps(loader, epochs=EPOCHS, accumulate=2):
            training.learn(batch, ckpt, steps=ckpt.batch % 2 == 1)
    return digest(training.model)


def stepping_itself(stop_at: int | None) -> list[float]:
    training = Training(stop_at)
    with training.checkpointer() as ckpt:
        for _ in range(ckpt.global_step, EPOCHS * PER_EPOCH):
            training.learn(torch.rand(BATCH, 4) + random.random() + np.random.rand(), ckpt)
            ckpt.step()
    return digest(training.model)


def accelerated(stop_at: int | None) -> list[float]:
    from accelerate import Accelerator

    from trainer_hook.accelerate import Checkpointer as Accelerated

    training, accelerator = Training(stop_at), Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(Rows(), batch_size=BATCH // 2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(training.model, training.optimizer, training.scheduler, loader)
    with Accelerated(accelerator) as ckpt:
        for _ in ckpt.epochs(EPOCHS):
            for batch in ckpt.steps(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).pow(2).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        terminate_at(ckpt.global_step + 1, stop_at)
            scheduler.step()
    return digest(training.model)


def lightning(stop_at: int | None, *, package: str = "lightning.pytorch", **arguments: Any) -> list[float]:
    pl = importlib.import_module(package)
    from trainer_hook.lightning import activate

    activate()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.save_hyperparameters({"of any class": Stop()})

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            if (self.trainer.fit_loop.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
                terminate_at(self.global_step + 1, stop_at)
            return self.net(batch).pow(2).mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            torch.rand(1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]

        def on_train_epoch_start(self) -> None:
            torch.rand(1)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    module, size = Module(), BATCH // arguments.get("accumulate_grad_batches", 1)
    trainer = pl.Trainer(accelerator="cpu", devices=1, **quiet, **({"max_epochs": EPOCHS} | arguments))
    loader = DataLoader(Rows(), batch_size=size, shuffle=True)
    trainer.fit(module, loader, DataLoader(Rows(), batch_size=BATCH))
    return digest(module)


class Stop:
    """A class that torch.load does not know."""


def lightning_validating_often(stop_at: int | None) -> list[float]:
    return lightning(stop_at, val_check_interval=2, accumulate_grad_batches=2)


def lightning_in_a_validation(stop_at: int | None, **arguments: Any) -> list[float]:
    """SIGTERM comes in the middle of the validation after a step; metrics of both kinds decide how training goes on."""
    import lightning.pytorch as pl

    from trainer_hook.lightning import activate

    activate()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).pow(2).mean()
            self.log("train", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val", self.net(batch).mean() + 10 * torch.rand(1))
            if batch_idx == 1 and not self.trainer.sanity_checking:
                terminate_at(self.global_step, stop_at)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    stopping = [pl.callbacks.EarlyStopping(name, patience=9, check_on_train_epoch_end=True) for name in ("train_epoch", "val")]
    module = Module()
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=stopping, **quiet, **arguments)
    trainer.fit(module, DataLoader(Rows(), batch_size=BATCH, shuffle=True), DataLoader(Rows(), batch_size=BATCH, shuffle=True))
    return digest(module)


def lightning_in_validations_by_the_way(stop_at: int | None) -> list[float]:
    return lightning_in_a_validation(stop_at, val_check_interval=2)


def lightning_by_steps(stop_at: int | None) -> list[float]:
    return lightning(stop_at, max_epochs=-1, max_steps=EPOCHS * PER_EPOCH)


def lightning_by_its_older_name(stop_at: int | None) -> list[float]:
    return lightning(stop_at, package="pytorch_lightning")


def life(
    training: str | Callable[[int | None], list[float]], stop_at: int | None, environ: dict[str, str]
) -> tuple[int, list[float]]:
    """Train by a function, or by that of this name here, in a process of its own. Returns its exit code and the weights."""
    receiving, sending = FORK.Pipe(duplex=False)

    def run() -> None:
        os.environ.update(environ)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(3)
        sending.send((globals()[training] if isinstance(training, str) else training)(stop_at))

    process = FORK.Process(target=run)
    process.start()
    sending.close()
    try:
        weights = receiving.recv()
    except EOFError:
        weights = []
    process.join()
    assert process.exitcode is not None
    return process.exitcode, weights


def imported_once() -> None:
    """Import what every life would."""
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(Net().parameters())
    optimizer.zero_grad()
    importlib.import_module("safetensors.torch")
