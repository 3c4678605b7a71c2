"""Checkpoint as the Hugging Face Trainer writes it: a real small model and its optimizer, scaled to a size.

python -m benchmarks.hf_checkpoint DIR MIB
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20
WORDS = 8192
WIDTH = 512
PARAMETERS_PER_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH
BYTES_PER_PARAMETER = 12
"""Weights, and the optimizer's two moments of each, as 32-bit floats."""


def main(folder: Path, mib: int) -> None:
    """Write the checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerState, TrainingArguments, get_scheduler

    layers = max(1, round((mib * MIB / BYTES_PER_PARAMETER - 2 * WORDS * WIDTH) / PARAMETERS_PER_LAYER))
    shape: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, **shape))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=10)
    ids = torch.randint(WORDS, (1, 4))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    scheduler.step()
    model.save_pretrained(folder, max_shard_size="100GB")
    _tokenizer().save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save(TrainingArguments(str(folder), report_to=[]), folder / "training_args.bin")
    TrainerState(global_step=1).save_to_json(str(folder / "trainer_state.json"))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"word{number}": number for number in range(WORDS - 1)} | {"[UNK]": WORDS - 1}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
