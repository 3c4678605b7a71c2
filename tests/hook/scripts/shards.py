"""Two ranks save sharded state asynchronously, with failures on one of them: torchrun … shards.py FOLDER."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer_hook.asynchronous import host_memory
from trainer_hook.asynchronous.background import Background
from trainer_hook.asynchronous.deferring import RankFailed
from trainer_hook.asynchronous.writer_process import WriterDied
from trainer_hook.loops import state_files

WIDTH = 64
FOLDER = Path(sys.argv[1])


def objects() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def step(trained: dict[str, Any]) -> None:
    trained["model"](torch.randn(4, WIDTH)).square().mean().backward()
    trained["optimizer"].step()
    trained["optimizer"].zero_grad()


class Rank:
    def __init__(self) -> None:
        self.number = dist.get_rank()
        self.group = dist.new_group(backend="gloo")
        self.background = Background(ranks=2)
        self.trained = objects()
        step(self.trained)

    def write(self, name: str) -> None:
        (FOLDER / name).mkdir(exist_ok=True)
        state = state_files.collect(self.trained)
        state_files.write(state, FOLDER / name, rank=self.number, group=self.group)

    def save(self, name: str, *, before: Callable[[], None] = lambda: None) -> Exception | None:
        """Save during the next step. Returns the error of this rank."""
        captured = self.background.capture(FOLDER / name, lambda: self.write(name))
        outcome: list[Exception | None] = []
        if captured is None:
            outcome.append(None)
        else:
            before()
            self.background.start(captured, FOLDER / name, outcome.append)
        step(self.trained)
        assert self.background.wait(60), "it hangs"
        return outcome[0]

    def expect(self, name: str, like: str) -> None:
        """Check that two checkpoints hold the same."""
        loaded = []
        for one in (name, like):
            found = objects()
            state_files.load(found, FOLDER / one, group=self.group)
            state = {**found["model"].state_dict(), **dict(enumerate(found["optimizer"].state_dict()["state"].values()))}
            loaded.append(
                [part for value in state.values() for part in (value.values() if isinstance(value, dict) else [value])]
            )
        assert all(one.full_tensor().equal(other.full_tensor()) for one, other in zip(*loaded, strict=True) if one.ndim)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    rank = Rank()
    me = rank.number

    rank.write("blocking")
    assert rank.save("asynchronous") is None
    rank.expect("asynchronous", "blocking")

    def kill_writer() -> None:
        if me == 1:
            os.kill(rank.background.pid or 0, signal.SIGKILL)

    assert isinstance(rank.save("died", before=kill_writer), WriterDied if me else RankFailed)
    assert not (FOLDER / "died/sharded/.metadata").exists()

    rank.write("blocking-2")
    nothing = host_memory.Limit(0 if me == 0 else 1 << 40, "of the machine")
    with mock.patch.object(host_memory, "available", return_value=nothing):
        rank.background = Background(ranks=2) if me == 0 else rank.background
        assert rank.save("mixed") is None
    rank.expect("mixed", "blocking-2")

    def fail() -> None:
        rank.write("failed")
        if me == 1:
            raise OSError("no space left")

    try:
        captured = rank.background.capture(FOLDER / "failed", fail)
        assert captured is not None
        outcome: list[Exception | None] = []
        rank.background.start(captured, FOLDER / "failed", outcome.append)
        assert rank.background.wait(60), "it hangs"
        assert me == 0
        assert "no space left" in str(outcome[0])
    except OSError:
        assert me == 1

    rank.write("blocking-3")
    assert rank.save("again") is None
    rank.expect("again", "blocking-3")
    rank.background.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
