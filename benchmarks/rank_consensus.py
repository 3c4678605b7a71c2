"""Cost of the ranks' consensus per step: ``torchrun --nproc_per_node=2 -m benchmarks.rank_consensus``.

Each step is a sleep, so that nothing else competes. Rank 0 prints the time of the consensus within a step, over all ranks,
median and mean; the mean includes the steps with an all-reduce, about one a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from trainer_hook.process.rank_consensus import RankConsensus, Vote


def main() -> None:
    """Run steps, and print the time that the consensus takes of them."""
    import torch.distributed as dist

    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--step-ms", type=float, default=2.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    consensus = RankConsensus()
    took_us = []
    for _ in range(options.steps):
        time.sleep(options.step_ms / 1000)
        began_s = time.perf_counter()
        consensus.tick("train", Vote)
        took_us.append((time.perf_counter() - began_s) * 1e6)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, took_us)
    if dist.get_rank() == 0:
        medians, means = [statistics.median(each) for each in of_all], [statistics.mean(each) for each in of_all]
        print(
            f"{len(of_all)} ranks, {options.steps} steps of {options.step_ms} ms: the consensus takes {max(medians):.1f} us "
            f"of a step (median of the slowest rank; mean {max(means):.1f} us, goal 20)"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
