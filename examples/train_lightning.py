"""A Lightning training script: a small network learns sines. One line of it is about checkpoints.

At the end it prints a digest of the weights, so that two runs can be compared bit for bit.
"""

import argparse
import hashlib
import time

import lightning as L  # noqa: N812 - as its own documentation does
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_hook.lightning import checkpointer


class Sines(L.LightningModule):
    def __init__(self, width: int, step_seconds: float) -> None:
        super().__init__()
        layers = [torch.nn.Linear(1, width), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(width, 1)]
        self.net = torch.nn.Sequential(*layers)
        self.step_seconds = step_seconds

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self.loss(batch)
        if self.global_rank == 0:
            print(f"step {self.global_step + 1} epoch {self.current_epoch} loss {loss.item():.4f}", flush=True)
        time.sleep(self.step_seconds)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("validation loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slows the loop down, to have time to look at it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(7)
    x = torch.rand(128 * options.devices, 1) * 6
    dataset = TensorDataset(x, x.sin())
    model = Sines(options.width, options.step_seconds)
    trainer = L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=options.devices,
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpointer()],
    )
    trainer.fit(model, DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8))

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    if trainer.is_global_zero:
        print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
