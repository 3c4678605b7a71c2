"""A hyperparameter search, then a training with what it found: ``search.py SLEEP_S``. It knows nothing of checkpoints."""

import sys

import optuna
import tiny
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments, set_seed

TOKENS = [[2 + (n + k) % 200 for k in range(8)] for n in range(64)]


def space(trial):
    print(f"trial {trial.number}", flush=True)
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def model_of_trial():
    set_seed(3)
    return tiny.model()


def main():
    torch.set_num_threads(1)
    rows = Dataset.from_dict({"input_ids": TOKENS, "labels": TOKENS})
    steps = {"max_steps": 10, "per_device_train_batch_size": 2, "eval_strategy": "epoch", "save_strategy": "no"}
    trainer = Trainer(
        model_init=model_of_trial,
        args=TrainingArguments(output_dir="output", report_to=[], disable_tqdm=True, use_cpu=True, **steps),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        callbacks=[tiny.Tells(float(sys.argv[1]))],
    )
    best = trainer.hyperparameter_search(hp_space=space, n_trials=3, sampler=optuna.samplers.RandomSampler(seed=3))
    print(f"best {best.run_id} {best.objective} {best.hyperparameters}", flush=True)
    trainer.args.learning_rate = best.hyperparameters["learning_rate"]
    trainer.train()
    print(f"weights {tiny.digest(trainer.model)}", flush=True)


main()
