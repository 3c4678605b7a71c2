"""Two ranks that train, destroy their process group, and train again in another one: ``two_groups.py loop|plain``."""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
LIMIT = datetime.timedelta(seconds=60)


def by_loop(call):
    from trainer_hook.torch import Checkpointer

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(model=model, optimizer=optimizer) as ckpt:
        for _ in ckpt.epochs(1):
            for batch in ckpt.steps([torch.ones(1, 2)] * 3):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()


def by_plain(call):
    from trainer_hook.plain import latest, save, stopping

    latest()
    for step in range(3 * call + 1, 3 * call + 4):
        stopping()
        save(step, lambda folder: (folder / f"rank-{RANK}").write_text("x"))


def group(name):
    dist.init_process_group("gloo", init_method=f"file://{name}", rank=RANK, world_size=2, timeout=LIMIT)


for call in (0, 1):
    group(Path(f"group-{call}").resolve())
    (by_loop if sys.argv[1] == "loop" else by_plain)(call)
    dist.destroy_process_group()
os.write(1, f"rank {RANK} ended\n".encode())
