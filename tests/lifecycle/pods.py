"""A pod with a lease, on a simulated clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sidecar.core.lifecycle.fencing import (
    Holder,
)
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.holder_watch import HolderWatch
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.lifecycle.renewal import Renewal
from sidecar.lifecycle.run_document import claim
from sidecar.lifecycle.take_over import TakeOver
from sidecar.store.file.store import FileStore
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import Node


class DeadlineIn(Deadline):
    """A deadline that does not come nearer by itself."""

    in_s: float | None = None

    def left_s(self) -> float | None:
        return self.in_s


class Pod:
    """A pod, with a clock of its own."""

    def __init__(
        self,
        store: FileStore,
        executor: StoreExecutor,
        name: str,
        *,
        job: str | None = "team/train",
        is_unique: bool = True,
        node: Node | None = None,
    ) -> None:
        self.store = store
        self.deadline = DeadlineIn()
        self.now_s = 0.0
        self.started_s = 0.0
        """Age of the pod when its clock began."""
        self.on_sleep: Callable[[], Awaitable[None]] | None = None
        clock = Clock(monotonic=lambda: self.now_s, sleep=self._sleep)
        self.lease = PrefixLease(store, executor, self, self.deadline, {}, clock=clock)
        self.renewal = Renewal(self.lease)
        self.watch = HolderWatch(self.lease)
        self.take_over = TakeOver(self.lease, self.renewal, self.watch)
        holder = Holder(name, is_unique=is_unique, node=node or Node(), job=job, run_id=None)
        self.lease.begin(claim(store, run_id=None, job=job), holder)

    def present_attempt(self) -> str | None:
        return None

    def age_s(self) -> float:
        return self.started_s + self.now_s

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.on_sleep is not None:
            await self.on_sleep()
