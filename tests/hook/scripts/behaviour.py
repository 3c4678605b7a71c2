"""What Trainer does, told as one line of JSON per case: ``behaviour.py``. It knows nothing of checkpoints."""

import hashlib
import json
import logging
import os
import random
from pathlib import Path

import numpy as np
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

TIMES = ("runtime", "per_second", "alloc_delta", "mem_")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": row, "labels": row.sum()}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Rows()[index] for index in range(64))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        set_seed(5)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        scores = self.body(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(scores, labels), "logits": scores}


class Notes(TrainerCallback):
    """Writes down every event and what the control says then."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, state, control, **more: self.seen.append(
            (name, state.global_step, [flag for flag, on in sorted(vars(control).items()) if on is True], sorted(more))
        )


class Fails(TrainerCallback):
    """Raises once, at a step."""

    def __init__(self, at, text):
        self.at, self.text = at, text

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at and self.text:
            text, self.text = self.text, None
            raise RuntimeError(text)


def trainer(folder, callbacks=(), *, rows=None, model_init=None, **arguments):
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 8, "learning_rate": 0.05}
    args = TrainingArguments(output_dir=folder, **quiet | {"num_train_epochs": 2, "logging_steps": 3} | arguments)
    model = None if model_init else Net()
    rows = rows if rows is not None else Rows()
    return Trainer(
        model=model, args=args, train_dataset=rows, eval_dataset=Rows(), callbacks=list(callbacks), model_init=model_init
    )


def digest(trained):
    numbers = [tensor.numpy().tobytes() for tensor in trained.model.state_dict().values()]
    return hashlib.sha256(b"".join(numbers)).hexdigest()


def told(trained, outcome=None):
    """Return what a script can see after training, but for what depends on the clock."""

    def steady(entry):
        return {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}

    state = vars(trained.state) | {"log_history": [steady(entry) for entry in trained.state.log_history]}
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    callbacks = [type(callback).__name__ for callback in trained.callback_handler.callbacks]
    returned = outcome and [outcome.global_step, outcome.training_loss, sorted(outcome.metrics)]
    return [digest(trained), state, drawn, callbacks, trained.args.to_dict(), returned]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def events(folder):
    for more in (
        {"save_strategy": "no"},
        {"save_steps": 5, "eval_strategy": "steps", "eval_steps": 4},
        {"save_strategy": "epoch", "eval_strategy": "epoch", "gradient_accumulation_steps": 3},
        {"max_steps": 7, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "eval_on_start": True},
    ):
        notes = Notes()
        trained = trainer(folder, [notes], **more)
        yield told(trained, trained.train())
        yield notes.seen


def own_checkpoints(folder):
    for name, more in {
        "limited": {"save_steps": 3, "save_total_limit": 2},
        "models": {"save_steps": 4, "save_only_model": True},
        "best": {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch"},
        "best at the end": {
            "save_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "load_best_model_at_end": True,
            "save_total_limit": 1,
        },
    }.items():
        trained = trainer(f"{folder}/{name}", **more)
        yield told(trained, trained.train())
        yield files(f"{folder}/{name}")


def own_resume(folder):
    for name, more in {
        "plain": {},
        "sums": {"gradient_accumulation_steps": 2},
        "workers": {"dataloader_num_workers": 1},
    }.items():
        own = f"{folder}/{name}"
        first = trainer(own, save_steps=3, **more)
        first.train()
        again = trainer(own, save_steps=3, **more)
        yield told(again, again.train(resume_from_checkpoint=f"{own}/checkpoint-3"))
        yield digest(again) == digest(first)
        latest = trainer(own, save_steps=3, num_train_epochs=3, **more)
        yield told(latest, latest.train(resume_from_checkpoint=True))


def wrong_resumes(folder):
    for wanted in (True, f"{folder}/checkpoint-77"):
        try:
            trainer(folder).train(resume_from_checkpoint=wanted)
        except Exception as error:
            yield [type(error).__name__, str(error)]


class Counts(TrainerCallback, ExportableState):
    """Two of a class, each with a state of its own."""

    def __init__(self, start=0):
        self.count = start

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"start": self.count}, "attributes": {}}


def states_of_callbacks(folder):
    counted = trainer(f"{folder}-2", [Counts(), Counts(10)], save_steps=3, max_steps=8)
    yield told(counted, counted.train())
    for step in (3, 6, 8):
        yield TrainerState.load_from_json(f"{folder}-2/checkpoint-{step}/trainer_state.json").stateful_callbacks
    steps = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "max_steps": 4}
    trainer(folder, [EarlyStoppingCallback(5, 0.2)], **steps).train()
    again = trainer(folder, [EarlyStoppingCallback()], restore_callback_states_from_checkpoint=True, **steps)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    [restored] = [c for c in again.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
    yield [restored.early_stopping_patience, restored.early_stopping_threshold]
    stopped = trainer(folder, [EarlyStoppingCallback(1, 10.0)], **steps | {"max_steps": 20})
    yield told(stopped, stopped.train())
    yield vars(TrainerState.load_from_json(f"{folder}/checkpoint-4/trainer_state.json"))["stateful_callbacks"]


def several_calls(folder):
    once = trainer(folder, model_init=Net, save_strategy="no")
    for seed in (1, 1, 2):
        once.args.seed = seed
        yield told(once, once.train())
    twice = trainer(folder, save_strategy="no")
    for _ in range(2):
        yield told(twice, twice.train())
        yield sorted(twice.evaluate())
    yield twice.predict(Rows()).predictions.tolist()


def errors(folder):
    failing = trainer(folder, [Fails(4, "of the script")], save_strategy="no")
    try:
        failing.train()
    except RuntimeError as error:
        yield str(error)
    yield told(failing, failing.train())
    smaller = trainer(folder, [Fails(1, "CUDA out of memory.")], auto_find_batch_size=True, save_strategy="no")
    yield told(smaller, smaller.train())
    yield smaller._train_batch_size


def overridden(folder):
    sizes = []

    class Own(Trainer):
        def get_batch_samples(self, iterator, count, device):
            sizes.append(count)
            return super().get_batch_samples(iterator, count, device)

        def _maybe_log_save_evaluate(self, *args, **kwargs):
            sizes.append(self.state.global_step)
            return super()._maybe_log_save_evaluate(*args, **kwargs)

        def log(self, logs, *args, **kwargs):
            sizes.append(sorted(logs))
            return super().log(logs, *args, **kwargs)

    made = trainer(folder, save_steps=3, gradient_accumulation_steps=3)
    made.__class__ = Own
    yield told(made, made.train())
    yield sizes


def streams(folder):
    streamed = trainer(folder, rows=Stream(), max_steps=11, save_steps=4)
    yield told(streamed, streamed.train())
    yield sorted(name for name in trainer(folder, skip_memory_metrics=False, max_steps=2).train().metrics)


def log_lines(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(handler)
    trainer(folder, save_steps=5, max_steps=5, log_level="info").train()
    logger.removeHandler(handler)
    yield [line for line in lines if "aving" not in line]


CASES = (
    events,
    own_checkpoints,
    own_resume,
    wrong_resumes,
    states_of_callbacks,
    several_calls,
    errors,
    overridden,
    streams,
    log_lines,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        os.write(1, json.dumps({case.__name__: list(case(case.__name__))}, default=str).encode() + b"\n")
