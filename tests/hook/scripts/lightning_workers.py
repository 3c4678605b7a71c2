"""A training with Lightning whose DataLoader worker gets SIGTERM, too, while the next batch is waited for."""

import multiprocessing
import os
import signal
import threading
import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.3)
        return torch.ones(8)


def terminate_all():
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGTERM)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGTERM)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch):
        return self.layer(batch).sum()

    def on_train_batch_end(self, *_):
        os.write(1, f"rank 0 step {self.trainer.global_step}\n".encode())
        if self.trainer.global_step == 3:
            threading.Thread(target=terminate_all).start()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Fails(Logger):
    """A logger that cannot be finalized after an error."""

    name, version = "fails", 0

    def log_metrics(self, metrics, step=None):
        """Hold nothing."""

    def log_hyperparams(self, *arguments, **more):
        """Hold nothing."""

    def finalize(self, status):
        if status == "failed":
            raise ConnectionError("the server of the logger is away")


class Holds(Fails):
    """A logger that writes at the end."""

    def finalize(self, status):
        os.write(1, f"finalized: {status}\n".encode())


quiet = {
    "logger": [Fails(), Holds()],
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1, prefetch_factor=1)
pl.Trainer(accelerator="cpu", devices=1, max_steps=5, **quiet).fit(Model(), loader)
