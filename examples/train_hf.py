"""An ordinary Hugging Face training script: a tiny Llama learns bytes of the text that ships with Python.

It knows nothing of checkpoints. At the end it prints a digest of the weights, so that two runs can be compared bit for bit.
"""

import argparse
import hashlib
import pydoc_data.topics

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Bytes(Dataset):
    """Windows of ``length`` bytes of a text; inputs and labels are the same, as causal models want it."""

    def __init__(self, text: bytes, length: int) -> None:
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--output-dir", default="output")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(options.seed)
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=options.hidden,
            intermediate_size=2 * options.hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            attention_dropout=0.1,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch,
            learning_rate=1e-3,
            warmup_steps=5,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=options.seed,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Bytes(text, length=128),
    )
    trainer.train()

    digest = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    if trainer.is_world_process_zero():
        print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
