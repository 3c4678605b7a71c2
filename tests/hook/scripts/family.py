"""One of the trainers of TRL and transformers on a tiny model: ``family.py KIND SLEEP_S``. It knows nothing of checkpoints."""

import sys

import tiny
import torch
import transformers
import trl
from datasets import Dataset
from transformers import set_seed

KIND, SLEEP_S = sys.argv[1], float(sys.argv[2])
NAMES = {"lora": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO", "grpo": "GRPO", "rloo": "RLOO"}
NAMES |= {"distillation": "Distillation", "seq2seq": "Seq2Seq"}
NUMBERS = range(64)
QUESTIONS = [f"question {n}: " for n in NUMBERS]
PAIRS = {"chosen": [f"answer {n}" for n in NUMBERS], "rejected": [f"no {n}" for n in NUMBERS]}
TOKENS = [[2 + (n + k) % 200 for k in range(8)] for n in NUMBERS]
ROWS = {
    "SFT": {"text": [f"a line of text, number {n}" for n in NUMBERS]},
    "DPO": {"prompt": QUESTIONS, **PAIRS},
    "Reward": PAIRS,
    "KTO": {"prompt": QUESTIONS, "completion": PAIRS["chosen"], "label": [n % 2 == 0 for n in NUMBERS]},
    "Seq2Seq": {"input_ids": TOKENS, "labels": TOKENS[::-1]},
}
GENERATING = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
MORE = {
    "SFT": {"max_length": 32},
    "GRPO": GENERATING,
    "RLOO": GENERATING,
    "Distillation": {"max_completion_length": 6},
    "Seq2Seq": {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "steps", "eval_steps": 4},
}


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def special(name):
    """Return what only this trainer is given."""
    if KIND == "lora":
        from peft import LoraConfig

        return {"peft_config": LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])}
    if name in ("GRPO", "RLOO"):
        return {"reward_funcs": lengths}
    if name == "Distillation":
        return {"teacher_model": tiny.model()}
    return {"eval_dataset": Dataset.from_dict(ROWS[name]).select(range(4))} if name == "Seq2Seq" else {}


def main():
    name = NAMES[KIND]
    library = transformers if name == "Seq2Seq" else trl
    torch.set_num_threads(1)
    set_seed(3)
    trained = tiny.translator() if name == "Seq2Seq" else tiny.model(scores=name == "Reward")
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
    arguments_class = "Seq2SeqTrainingArguments" if name == "Seq2Seq" else f"{name}Config"
    trainer = getattr(library, f"{name}Trainer")(
        model=trained,
        args=getattr(library, arguments_class)(**arguments | MORE.get(name, {})),
        train_dataset=Dataset.from_dict(ROWS.get(name, {"prompt": QUESTIONS})),
        processing_class=tiny.tokenizer(),
        callbacks=[tiny.Tells(SLEEP_S)],
        **special(name),
    )
    trainer.train()
    print(f"weights {tiny.digest(trainer.model)}", flush=True)


main()
