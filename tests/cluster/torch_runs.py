"""Runs of torchrun whose rank 0 prints steps (examples/train_fsdp.py)."""

from __future__ import annotations

from tests.cluster.kubectl import until
from tests.cluster.story import Story, steps

PATIENCE_S = 400.0


def torchrun(first_host: str, *options: str, nodes: int | str = 2) -> list[str]:
    rendezvous = [f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={first_host}:29500"]
    return ["python3", "-m", "torch.distributed.run", *rendezvous, "/scripts/train_fsdp.py", *options]


def rank_zero(story: Story, life: int, step: int) -> str:
    """Wait until the run, in this life of its rank 0, has done a step; return the pod of rank 0, which alone prints steps."""

    def found() -> str:
        said = [each for each in story.lives() if steps(each)]
        return said[life].pod if len(said) > life and steps(said[life])[-1] >= step else ""

    return until(found, what=lambda: f"step {step} in life {life}\n{story.namespace.watch.report()}", timeout_s=PATIENCE_S)


def assert_each_step_was_done_once(story: Story) -> None:
    done = [step for life in story.lives() for step in steps(life)]
    assert done == list(range(1, len(done) + 1))
