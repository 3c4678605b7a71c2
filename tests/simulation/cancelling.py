"""Cancels all tasks of one sidecar at one instant of a schedule, as the event loop does at the end of a process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any
from unittest.mock import patch

from tests.simulation.job.life import Life
from tests.simulation.job.loop import Process, SimulatedLoop, current_process

ENDS_WITHIN_S = 20.0
"""Longest time from the cancellation until the last task has ended."""
POLL_S = 0.25
AGAIN_S = 0.5


class Cancelling:
    """Cancels the tasks of a sidecar after the ``which``-th callback, and starts it again; ``None``: only counts callbacks."""

    def __init__(self, which: int | None) -> None:
        self.count = 0
        self.cancelled: Life | None = None
        self.left: list[str] = []
        """Tasks that had not ended in time."""
        self._which = which
        self._lives: list[Life] = []
        self._tasks: dict[Process, list[Any]] = defaultdict(list)

    @contextmanager
    def active(self) -> Iterator[None]:
        create, spawn, run = SimulatedLoop.create_task, SimulatedLoop.spawn, SimulatedLoop._run

        def create_task(loop: SimulatedLoop, work: Any, *, name: str | None = None, context: Context | None = None) -> Any:
            task = create(loop, work, name=name, context=context)
            if context is None and (process := current_process()) is not None:
                self._tasks[process].append(task)
            return task

        def spawned(loop: SimulatedLoop, process: Process, work: Any) -> Any:
            task = spawn(loop, process, work)
            if isinstance(process, Life):
                self._lives.append(process)
                self._tasks[process].append(task)
            return task

        def run_one(loop: SimulatedLoop, handle: Any) -> None:
            run(loop, handle)
            self.count += 1
            if self._which is not None and self.count >= self._which and self.cancelled is None and not loop._is_ending:
                self._cancel_one(loop)

        with patch.multiple(SimulatedLoop, create_task=create_task, spawn=spawned, _run=run_one):
            yield

    def _cancel_one(self, loop: SimulatedLoop) -> None:
        alive = [life for life in self._lives if life.pod.life is life and life.pod.is_alive and hasattr(life, "_in_life")]
        if not alive:
            return
        self.cancelled = life = alive[self.count % len(alive)]
        life.pod.world.tell(f"the tasks of {life} are cancelled")
        life.services.resume_service.close()
        for task in self._tasks[life]:
            task.cancel()
        loop.call_at(loop.now_s + POLL_S, self._ended, loop, loop.now_s, context=Context())

    def _ended(self, loop: SimulatedLoop, since_s: float) -> None:
        life = self.cancelled
        assert life is not None
        left = [task for task in self._tasks[life] if not task.done()]
        if life.is_dead:
            return
        if left and loop.now_s - since_s < ENDS_WITHIN_S:
            loop.call_at(loop.now_s + POLL_S, self._ended, loop, since_s, context=Context())
            return
        self.left = [repr(task) for task in left]
        life.pod.crash(AGAIN_S)
