"""Ranks as threads of a test: what they say to each other is real, and calls that do not match are found at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from trainer_hook.process.rank_consensus import RankConsensus, World

Result = TypeVar("Result")
WAIT_S = 30.0


class _Ranks:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.said: list[tuple[str, Any]] = [("", None)] * size

    def exchange(self, rank: int, call: str, value: Any) -> list[Any]:
        self.said[rank] = call, value
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        assert {other for other, _ in heard} == {call}, f"different collective calls: {heard}"
        return [value for _, value in heard]


class ThreadConsensus(RankConsensus):
    """One rank, on a node of its own."""

    def __init__(self, ranks: _Ranks, rank: int, size: int) -> None:
        super().__init__()
        self._ranks = ranks
        self.world = World(rank, size, rank, size, (rank,))

    def all_agree(self, yes: bool) -> bool:
        return all(self._ranks.exchange(self.world.rank, "all_agree", yes))

    def from_rank_0(self, value: Any) -> Any:
        return self._ranks.exchange(self.world.rank, "from_rank_0", value)[0]


def on_ranks(size: int, act: Callable[[ThreadConsensus], Result]) -> list[Result]:
    """Return what ``act`` returns on each rank. Raises ``BrokenBarrierError``: a rank waits for another that never comes."""
    ranks = _Ranks(size)

    def one(rank: int) -> Result:
        result = act(ThreadConsensus(ranks, rank, size))
        ranks.exchange(rank, "end", None)
        return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
