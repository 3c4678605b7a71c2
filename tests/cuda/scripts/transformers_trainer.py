"""An ordinary script with the Hugging Face Trainer, on the device that is named. It knows nothing of checkpoints."""

import argparse
import hashlib
import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Net(torch.nn.Module):
    """Dropout draws from the generator of the device."""

    def __init__(self, width: int) -> None:
        super().__init__()
        dropout = torch.nn.Dropout(0.2)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, width), dropout, torch.nn.BatchNorm1d(width), torch.nn.GELU(), torch.nn.Linear(width, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(x), labels)}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.mean(0, keepdim=True)}


class Tells(TrainerCallback):
    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds

    def on_step_end(self, args, state, control, **kwargs) -> None:
        print(f"step {state.global_step} done", flush=True)
        time.sleep(self.step_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", choices=["fp16", "bf16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(7)  # the weights at the beginning
    arguments = TrainingArguments(
        output_dir="output",
        max_steps=48,
        per_device_train_batch_size=8,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        full_determinism=True,
        fp16=options.precision == "fp16",
        bf16=options.precision == "bf16",
        torch_compile=options.compile,
        use_cpu=options.device == "cpu",
    )
    trainer = Trainer(model=Net(options.width), args=arguments, train_dataset=Rows(), callbacks=[Tells(options.step_seconds)])
    trainer.train()
    print(f"device {next(trainer.model.parameters()).device.type}", flush=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    print(f"weights sha256 {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
