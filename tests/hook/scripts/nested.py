"""A training whose callback trains another model: by another Trainer, and by a loop of its own."""

import os
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from trainer_hook.torch import Checkpointer


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": (row.sum() > 0).long()}


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 2))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.body(x), labels)}


def trainer(width, steps, callbacks=()):
    told = {"output_dir": "output", "max_steps": steps, "per_device_train_batch_size": 4, "save_strategy": "no"}
    arguments = TrainingArguments(**told, report_to=[], disable_tqdm=True, use_cpu=True)
    return Trainer(model=Net(width), args=arguments, train_dataset=Rows(), callbacks=list(callbacks))


class Probes(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.write(1, f"rank 0 step {state.global_step}\n".encode())
        if state.global_step == 4:
            probe = trainer(3, steps=5)
            probe.train()
            model = Net(5)
            steps = 0
            with Checkpointer(model=model) as ckpt:
                for _ in ckpt.epochs(2):
                    steps += sum(1 for _ in ckpt.steps(range(3)))
            os.write(1, f"probes ended at {probe.state.global_step} and {steps}\n".encode())
        if state.global_step == int(sys.argv[1]):
            os.kill(os.getpid(), 15)


set_seed(3)
trainer(16, steps=8, callbacks=[Probes()]).train()
