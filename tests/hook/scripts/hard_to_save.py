"""A Trainer whose state and model the libraries do not save, or do not load again. Told as one JSON argument."""

import enum
import hashlib
import json
import os
import sys
import time

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed

TOLD = {"sleep_s": 0.0, "enum": False, "own": "", "complex": False} | json.loads(sys.argv[1])


class Mode(enum.StrEnum):
    A = "a"


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 64), "labels": torch.tensor(index % 2)}


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        if not TOLD["own"]:  # Trainer's own save of such a model ends training
            self.second.weight = self.first.weight

    def forward(self, x, labels):
        logits = self.head(torch.nn.functional.dropout(self.second(self.first(x)), 0.1, self.training))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Pretrained(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.head = torch.nn.Linear(4, 2)
        self.register_buffer("angles", torch.ones(2, dtype=torch.complex128))

    def forward(self, x, labels):
        logits = self.head(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tells(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.write(1, f"rank 0 step {state.global_step}\n".encode())
        time.sleep(TOLD["sleep_s"])


set_seed(3)
model = Pretrained(PretrainedConfig()) if TOLD["complex"] else Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 20)))
if TOLD["enum"]:
    optimizer.param_groups[0]["mode"] = Mode.A
saves = {"save_strategy": "steps", "save_steps": 2} if TOLD["own"] else {"save_strategy": "no"}
arguments = TrainingArguments(
    output_dir=TOLD["own"] or "out",
    max_steps=20,
    per_device_train_batch_size=4,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    **saves,
)
Trainer(model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, scheduler), callbacks=[Tells()]).train()
found = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
os.write(1, f"weights {hashlib.sha256(found).hexdigest()}\n".encode())
