"""A tiny language model and a tokenizer of bytes, both built here: nothing is downloaded."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {letter: number for number, letter in enumerate(["<eos>", "<pad>", *LETTERS])}


class Tells(TrainerCallback):
    def __init__(self, sleep_s):
        self.sleep_s = sleep_s

    def on_step_end(self, args, state, control, **kwargs):
        os.write(1, f"rank 0 step {state.global_step}\n".encode())
        time.sleep(self.sleep_s)


def tokenizer():
    made = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", chat_template=TEMPLATE)


def model(*, scores=False):
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    if not scores:
        return LlamaForCausalLM(config)
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def translator():
    config = T5Config(vocab_size=len(VOCABULARY), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    config.pad_token_id, config.eos_token_id, config.decoder_start_token_id = 1, 0, 1
    return T5ForConditionalGeneration(config)


def digest(trained):
    found = hashlib.sha256()
    for name, tensor in sorted(trained.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":  # what a script that knows nothing of tests can load: tiny.py MODEL DATA
    set_seed(3)
    model().save_pretrained(sys.argv[1])
    tokenizer().save_pretrained(sys.argv[1])
    rows = [json.dumps({"text": f"a line of text, number {n}"}) for n in range(64)]
    Path(sys.argv[2]).mkdir()
    Path(sys.argv[2], "train.jsonl").write_text("\n".join(rows))
