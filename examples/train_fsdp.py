"""A PyTorch training loop whose model is sharded over processes by ``fully_shard``, on CPUs or GPUs: torchrun … train_fsdp.py.

At the end it prints a digest of the weights, so that two runs can be compared bit for bit.
"""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer_hook.torch import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slows the loop down, to have time to look at it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    torch.manual_seed(7)
    x = torch.rand(256, 1) * 6
    dataset = TensorDataset(x, x.sin())
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    model = model.to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    torch.manual_seed(dist.get_rank())

    with Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler) as ckpt:
        for epoch in ckpt.epochs(options.epochs):
            for inputs, targets in ckpt.steps(loader):
                loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    print(f"step {ckpt.global_step + 1} epoch {epoch} loss {loss.item():.4f}", flush=True)
                time.sleep(options.step_seconds)
            scheduler.step()

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.full_tensor().cpu().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"weights sha256 {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
