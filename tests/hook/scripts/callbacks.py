"""Callbacks whose states Trainer restores: ``callbacks.py STOP_AT``, a step at which it sends SIGTERM to itself, or 0."""

import os
import signal
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

STOP_AT = int(sys.argv[1])


def tell(text):
    os.write(1, f"{text}\n".encode())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": row.sum()}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        scores = self.body(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(scores, labels), "logits": scores}


class Tells(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        tell(f"rank 0 step {state.global_step}")
        if state.global_step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_evaluate(self, args, state, control, **kwargs):
        tell(f"evaluated {state.global_step}")


class Budget(TrainerCallback, ExportableState):
    """Ends training after a number of steps, those of earlier processes included."""

    def __init__(self, steps=50, used=0):
        self.steps, self.used = steps, used

    def on_step_end(self, args, state, control, **kwargs):
        self.used += 1
        control.should_training_stop |= self.used >= self.steps

    def state(self):
        return {"args": {"steps": self.steps, "used": self.used}, "attributes": {}}


def main():
    torch.set_num_threads(1)
    set_seed(3)
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    evaluation = {"eval_strategy": "steps", "eval_steps": 4, "eval_on_start": True}
    arguments = TrainingArguments("output", max_steps=30, restore_callback_states_from_checkpoint=True, **quiet, **evaluation)
    budgets = [Budget(), Budget(9)]
    trainer = Trainer(Net(), arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Tells(), *budgets])
    ended = trainer.train().global_step
    tell(f"budgets {[c.used for c in trainer.callback_handler.callbacks if isinstance(c, Budget)]} at {ended}")
    tell(f"weights {[tensor.tolist() for tensor in trainer.model.parameters()]}")


main()
