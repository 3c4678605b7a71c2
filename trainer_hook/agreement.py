"""How ranks that see different things at different steps do the same thing at the same step.

Every rank all-reduces a few floats on a gloo group of its own, at steps that all ranks compute alike: about once a second. No
rank ever waits for a signal of its own, and the accelerator is not touched.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

INTERVAL_MS = 1000.0
MOST_STEPS = 1000
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank wants, or what all agreed on: the maximum over the ranks."""

    stop: bool = False
    save: bool = False
    manual: bool = False
    """Somebody asked for the save."""


def next_check(step: int, *, ms_per_step: float) -> int:
    """Return the step at which the ranks talk next: about ``INTERVAL_MS`` on, at least one step, at most ``MOST_STEPS``."""
    return step + max(1, min(MOST_STEPS, int(INTERVAL_MS / max(ms_per_step, 1e-3))))


@dataclass(frozen=True, slots=True)
class World:
    """This process among all training processes."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def node(self) -> int:
        """Index of this node."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return max(1, self.size // self.local_size)


def world_from_torch() -> World:
    """Return this process's place. Without an initialised process group it is alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return World()
    size, rank = dist.get_world_size(), dist.get_rank()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or size)
    local_rank = int(os.environ.get("LOCAL_RANK") or rank % local_size)
    return World(rank, size, local_rank, local_size)


def new_attempt() -> str:
    """Return an id that sorts by time: one start of the whole job."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}"


class Agreement:
    """Talks to the other ranks. Alone it answers at once, at every step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._group: Any = None
        self._next_step = 0
        self._last: tuple[int, float] | None = None
        if world.size > 1:
            import torch.distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))

    def begin(self, step: int) -> None:
        """Start counting at a step that all ranks share."""
        self._next_step = step + 1
        self._last = (step, time.monotonic())

    def due(self, step: int) -> bool:
        """Whether this is a step at which wishes are exchanged."""
        return self._group is None or step >= self._next_step

    def agree(self, step: int, mine: Wish) -> Wish:
        """Return what all ranks agree on; call it on every rank where ``due``."""
        if self._group is None:
            return mine
        ms = self._ms_per_step(step)
        stop, save, manual, slowest_ms = self._reduce([float(mine.stop), float(mine.save), float(mine.manual), ms])
        self._next_step = next_check(step, ms_per_step=slowest_ms)
        return Wish(stop > 0, save > 0, manual > 0)

    def _ms_per_step(self, step: int) -> float:
        before_step, before_s = self._last or (step, time.monotonic())
        now_s = time.monotonic()
        self._last = (step, now_s)
        return 1000 * (now_s - before_s) / max(1, step - before_step)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes. A barrier."""
        return yes if self._group is None else self._reduce([float(not yes)])[0] == 0

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self._group is None:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group, device="cpu")
        return box[0]

    def _reduce(self, values: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        reduced: list[float] = tensor.tolist()
        return reduced
