"""TRL's SFTTrainer on a tiny model and a tokenizer that is built here, of bytes."""

import hashlib
import sys
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer


class Tells(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"rank 0 step {state.global_step}", flush=True)
        time.sleep(float(sys.argv[1]))


torch.set_num_threads(1)
set_seed(3)
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: number for number, letter in enumerate(["<eos>", "<pad>", *letters])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="output",
        max_steps=12,
        per_device_train_batch_size=2,
        max_length=32,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    ),
    train_dataset=Dataset.from_dict({"text": [f"a line of text, number {number}" for number in range(64)]}),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"),
    callbacks=[Tells()],
)
trainer.train()
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.numpy().tobytes())
print(f"weights {digest.hexdigest()}", flush=True)
