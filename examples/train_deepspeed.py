"""A training loop with DeepSpeed ZeRO 2: a small network learns sines. Start it with deepspeed or torchrun.

At the end it prints a digest of the weights, so that two runs can be compared bit for bit.
"""

import argparse
import hashlib
import time

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer_hook.deepspeed import Checkpointer

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 1_000_000,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slows the loop down, to have time to look at it")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if not torch.cuda.is_available():  # on CPUs DeepSpeed would compile an operation for a minute that gloo has, too
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(7)
    x = torch.rand(512, 1) * 6
    dataset = TensorDataset(x, x.sin())
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    torch.manual_seed(dist.get_rank())

    with Checkpointer(engine, sampler=sampler) as ckpt:
        for epoch in ckpt.epochs(options.epochs):
            for inputs, targets in ckpt.steps(loader):
                loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
                engine.backward(loss)
                engine.step()
                if dist.get_rank() == 0 and engine.micro_steps % 2 == 0:
                    print(f"step {ckpt.global_step + 1} epoch {epoch} loss {loss.item():.4f}", flush=True)
                    time.sleep(options.step_seconds)

    digest = hashlib.sha256()
    for name, tensor in sorted(engine.module.state_dict().items()):
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"weights sha256 {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
