"""A Trainer whose saves hold only a part, as LLaVA's do: ``partial_saves.py STEPS SLEEP_S OUTPUT [SAVE_STEPS]``."""

import os
import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

STEPS, SLEEP_S, OUTPUT = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
SAVES = {"save_strategy": "steps", "save_steps": int(sys.argv[4])} if len(sys.argv) > 4 else {"save_strategy": "no"}
RANK = os.environ.get("RANK", "0")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "labels": torch.tensor(index % 2)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.projector = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        logits = self.projector(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Partial(Trainer):
    def _save_checkpoint(self, model, trial, metrics=None):
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.local_rank in (0, -1):
            torch.save(self.model.projector.state_dict(), folder / "projector.bin")


class Tells(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.write(1, f"rank {RANK} step {state.global_step}\n".encode())
        time.sleep(SLEEP_S)


arguments = TrainingArguments(
    output_dir=OUTPUT, max_steps=STEPS, per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True, **SAVES
)
Partial(model=Net(), args=arguments, train_dataset=Rows(), callbacks=[Tells()]).train()
os.write(1, f"rank {RANK} ended\n".encode())
