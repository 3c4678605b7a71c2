"""A tiny language model and a tokenizer of bytes, both built here: nothing is downloaded."""

import hashlib
import os
import time

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback

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


def digest(trained):
    found = hashlib.sha256()
    for name, tensor in sorted(trained.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()
