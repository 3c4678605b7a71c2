"""Consensus of the ranks: events that ranks notice at different times lead to the same action at the same step.

Every rank all-reduces a few floats over a separate gloo group, about once a second, at steps that all ranks compute alike.
The accelerator is not used.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_hook.process.log import set_rank, warn

INTERVAL_MS = 1000.0
MAX_TICKS = 1000
MIN_TIMEOUT_S = 1800.0
"""Lower bound of the timeout for another rank. It exceeds any save or download, during which a rank does not answer."""
MAX_TIMEOUT_S = 365 * 86400.0
"""Upper bound: gloo adds the timeout to a clock, which overflows."""


class RanksUnreachable(RuntimeError):
    """Another rank died or does not answer: no rank can save any more."""


@dataclass(frozen=True, slots=True)
class Vote:
    """Requests of one rank, or of all: the maximum over the ranks."""

    stop: bool = False
    save: bool = False
    manual: bool = False
    """The save was requested through the API."""


def next_check(tick: int, *, ms_per_tick: float) -> int:
    """Return the tick of the next all-reduce: about ``INTERVAL_MS`` later, at least one tick, at most ``MAX_TICKS``."""
    return tick + max(1, min(MAX_TICKS, int(INTERVAL_MS / max(ms_per_tick, 1e-3))))


@dataclass(frozen=True, slots=True)
class World:
    """This process among all training processes."""

    rank: int = 0
    size: int = 1
    node: int = 0
    """Index of this node."""
    nodes: int = 1
    """Number of nodes."""
    ranks: tuple[int, ...] = (0,)
    """All ranks of this node, in order."""

    @property
    def local_rank(self) -> int:
        """Index of this process among those of its node."""
        return self.ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of processes on this node."""
        return len(self.ranks)


def place_among(names: Sequence[str], rank: int) -> World:
    """Return a rank's place from the host names of all ranks; nodes are numbered in the order of their first rank."""
    hosts = list(dict.fromkeys(names))
    mine = (other for other, name in enumerate(names) if name == names[rank])
    return World(rank, len(names), hosts.index(names[rank]), len(hosts), tuple(mine))


def place_in_blocks(rank: int, size: int, *, local_rank: int, local_size: int) -> World:
    """Return a rank's place where each node has ``local_size`` consecutive ranks, as with torchrun."""
    first = rank - local_rank
    return World(rank, size, rank // local_size, max(1, size // local_size), tuple(range(first, first + local_size)))


def place_by_launcher(environ: Mapping[str, str], rank: int, size: int) -> World | None:
    """Return a rank's place from the variables of torchrun or deepspeed; ``None``: they are not set."""
    local_rank = environ.get("LOCAL_RANK", "")
    local_size = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or ""  # torchrun's, deepspeed's
    if not (local_rank.isdigit() and local_size.isdigit()):
        return None
    return place_in_blocks(rank, size, local_rank=int(local_rank), local_size=int(local_size))


def new_attempt() -> str:
    """Return an id for one start of the whole job. Ids sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:8]}"


def _scripts_group() -> Any:
    """Return the process group that the script has initialized; ``None``: there is none."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def scripts_timeout_s() -> float:
    """Return the timeout that the script gave its own process group; 0: unknown."""
    import torch.distributed as dist

    timeouts_s = [0.0]
    with contextlib.suppress(Exception):  # no public interface
        group: Any = dist.distributed_c10d._get_default_group()
        for device in group._device_types:
            with contextlib.suppress(Exception):  # a backend without readable options
                timeouts_s.append(group._get_backend(device).options._timeout.total_seconds())
    return max(timeouts_s)


def _barrier_of_script() -> Any:
    """Return the barrier of the script's own group, where that has gloo; ``None``: it has not.

    It fails at once where a rank has died: ``new_group`` waits for it in the store, which does not see that. Unlike other
    collectives it takes a timeout: that of the script may be shorter than the way of another rank to ``train()``.
    """
    import torch
    import torch.distributed as dist

    with contextlib.suppress(Exception):  # no public interface where the group has a backend for GPUs as well
        group: Any = dist.distributed_c10d._get_default_group()
        if group._get_backend(torch.device("cpu")).name() == "gloo":
            return group.monitored_barrier
    return None


def _unreachable(error: RuntimeError) -> RanksUnreachable:
    text = f"another rank cannot be reached ({str(error)[:200]}): ends, because nothing could be saved any more"
    warn(text)
    return RanksUnreachable(text)


class RankConsensus:
    """Communicates with the other ranks. A single process decides alone, at every tick."""

    def __init__(self, *, timeout_s: float = MIN_TIMEOUT_S) -> None:
        """Collective, after ``init_process_group``. Without a process group this is a single process.

        ``timeout_s``: longest wait for another rank, if the script's own process group does not wait longer.
        """
        self.world = World()
        self.group: Any = None
        """The gloo group of all ranks; ``None``: a single process."""
        self._joined: weakref.ref[Any] | None = None
        """The script's process group when this joined it; ``None``: there was none."""
        self._tick = self._next_tick = 0
        self._kind = ""
        self._last: tuple[int, float] | None = None
        self.waits_since_s: float | None = None
        """Monotonic start of the collective that this rank waits in; ``None``: it does not wait."""
        self._timeout_s = max(MIN_TIMEOUT_S, timeout_s)
        self._join()

    def rejoin(self) -> bool:
        """Join the process group that the script has now, unless it is the one joined before. Returns whether it did.

        A script may destroy its group and initialize another one between two calls of ``train()``. Collective if it has.
        """
        joined, present = self._joined and self._joined(), _scripts_group()
        if joined is present and (present is not None or self.group is None):
            return False
        self.world, self.group, self._joined = World(), None, None
        self._tick = self._next_tick = 0
        self._kind, self._last = "", None
        self._join()
        return True

    def new_group(self) -> Any:
        """Return another gloo group of all ranks, for use in a thread; ``None``: a single process. Collective."""
        if self.group is None:
            return None
        import torch.distributed as dist

        return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._timeout_s))

    def _join(self) -> None:
        if (present := _scripts_group()) is None:
            return
        import torch.distributed as dist

        self._joined = weakref.ref(present)
        if dist.get_world_size() == 1:
            return
        # Where the script lets a rank work alone for hours, no rank may be given up before.
        self._timeout_s = min(MAX_TIMEOUT_S, max(self._timeout_s, scripts_timeout_s()))
        timeout = datetime.timedelta(seconds=self._timeout_s)
        try:
            if (arrive := _barrier_of_script()) is not None:
                arrive(timeout, wait_all_ranks=False)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            raise _unreachable(error) from error
        rank, size = dist.get_rank(), dist.get_world_size()
        set_rank(rank)
        world = place_by_launcher(os.environ, rank, size) if os.environ.get("LOCAL_WORLD_SIZE") else None
        if world is None or world.local_size == 1:  # mpirun, srun and the like
            places: list[Any] = [None] * size
            dist.all_gather_object(places, (socket.gethostname(), os.environ.get("LOCAL_RANK", "0")), group=self.group)
            # On CPUs accelerate sets LOCAL_WORLD_SIZE=1 where the launcher says nothing.
            if world is None or any(local_rank != "0" for _, local_rank in places):
                world = place_among([host for host, _ in places], rank)
        self.world = world

    def tick(self, kind: str, mine: Callable[[], Vote]) -> Vote:
        """Return the combined vote of all ranks; an empty vote at a tick without an all-reduce.

        Every rank calls it at the same steps of the same kind. A new kind reduces at once, because its ticks may take much
        longer than those from which the interval was computed. ``kind`` names the current activity, such as training or
        evaluation; ``mine`` returns this rank's vote, and is called only for an all-reduce.

        Raises ``RanksUnreachable``: training without saves would go on to its end, and fail there.
        """
        if self.group is None:
            return mine()
        self._tick += 1
        if kind == self._kind and self._tick < self._next_tick:
            return Vote()
        if kind != self._kind:
            self._kind, self._last = kind, None
        vote = mine()
        try:
            stop, save, manual, slowest_ms = self._reduce(
                [float(vote.stop), float(vote.save), float(vote.manual), self._ms_per_tick()]
            )
        except RuntimeError as error:
            raise _unreachable(error) from error
        self._next_tick = next_check(self._tick, ms_per_tick=slowest_ms)
        return Vote(stop > 0, save > 0, manual > 0)

    def _ms_per_tick(self) -> float:
        now_s = time.monotonic()
        before_tick, before_s = self._last or (self._tick - 1, now_s - INTERVAL_MS / 1000)
        self._last = (self._tick, now_s)
        return 1000 * (now_s - before_s) / max(1, self._tick - before_tick)

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank passes true. A barrier."""
        return yes if self.group is None else self._reduce([float(not yes)])[0] == 0

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.group is None:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device="cpu")
        return box[0]

    def _reduce(self, values: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        self.waits_since_s = time.monotonic()
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        finally:
            self.waits_since_s = None
        reduced: list[float] = tensor.tolist()
        return reduced
