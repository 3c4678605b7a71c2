"""One of TRL's trainers on a tiny model: ``family.py KIND SLEEP_S``. It knows nothing of checkpoints."""

import importlib
import sys

import tiny
import torch
from datasets import Dataset
from transformers import set_seed

KIND, SLEEP_S = sys.argv[1], float(sys.argv[2])
NAMES = {"sft": "SFT", "lora": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO", "kto": "KTO", "rloo": "RLOO"}
NUMBERS = range(64)
PAIRS = {
    "prompt": [f"question {n}: " for n in NUMBERS],
    "chosen": [f"answer {n}" for n in NUMBERS],
    "rejected": [f"no {n}" for n in NUMBERS],
}
ROWS = {
    "SFT": {"text": [f"a line of text, number {n}" for n in NUMBERS]},
    "DPO": PAIRS,
    "Reward": {"chosen": PAIRS["chosen"], "rejected": PAIRS["rejected"]},
    "KTO": {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [n % 2 == 0 for n in NUMBERS]},
    "GRPO": {"prompt": PAIRS["prompt"]},
    "RLOO": {"prompt": PAIRS["prompt"]},
}
GENERATING = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
MORE = {"SFT": {"max_length": 32}, "GRPO": GENERATING, "RLOO": GENERATING}


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def main():
    name = NAMES[KIND]
    trl = importlib.import_module("trl")
    torch.set_num_threads(1)
    set_seed(3)
    trained = tiny.model(scores=name == "Reward")
    if name in ("DPO", "KTO", "GRPO", "RLOO"):  # they load the model that they compare with by its name
        trained.save_pretrained("model")
        trained = type(trained).from_pretrained("model")
    arguments = {
        "output_dir": "output",
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    given = {"reward_funcs": lengths} if name in ("GRPO", "RLOO") else {}
    if KIND == "lora":
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    trainer = getattr(trl, f"{name}Trainer")(
        model=trained,
        args=getattr(trl, f"{name}Config")(**arguments | MORE.get(name, {})),
        train_dataset=Dataset.from_dict(ROWS[name]),
        processing_class=tiny.tokenizer(),
        callbacks=[tiny.Tells(SLEEP_S)],
        **given,
    )
    trainer.train()
    print(f"weights {tiny.digest(trainer.model)}", flush=True)


main()
