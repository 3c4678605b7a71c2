"""What all parts of a schedule share: time, luck, who acts, the story, and the first broken invariant."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from tests.simulation import world
from tests.simulation.audit import Violation
from tests.simulation.job.loop import EPOCH_S, Process, SimulatedLoop, current_process
from tests.simulation.world import SLOWEST_S

GIVEN_UP_AFTER_S = 1.0
"""How long a client waits for an answer that never comes."""


class Killed(BaseException):
    """The process that this simulated thread belongs to is dead: nothing more of it runs."""


class Held(BaseException):
    """A simulated thread that would wait for its turn to send: it begins again later."""


HELD_S = 0.2
"""How long until then."""


@dataclass(frozen=True, slots=True)
class Faults(world.Faults):
    """Shares of requests to which something happens, of a store that may also show new objects late."""

    hidden: float = 0.0
    """New objects that the store answers with 404, and leaves out of listings, for up to ``hidden_s``."""
    hidden_s: float = 8.0
    repeated_s: float = SLOWEST_S
    """Longest time until a repeated request arrives again."""


class World:
    """One schedule's surroundings."""

    def __init__(self, seed: int, faults: Faults, *, tell: bool = False) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.loop = SimulatedLoop(self._offload)
        self.acting: Process | None = None
        """Whose request the store carries out now."""
        self.issued_s = 0.0
        """When that request left its pod."""
        self.is_stray = False
        """Whether its sender is dead, or had an answer to it before."""
        self.faults_hid = False
        """Whether the store hid new objects at any time."""
        self.calls = 0
        """Requests of the call that runs now in a simulated thread."""
        self.story: list[str] | None = [] if tell else None
        self.counts: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        return self.loop.now_s

    def epoch(self) -> float:
        return EPOCH_S + self.loop.now_s

    def at(self, at_s: float, act: Callable[..., object], *args: Any) -> None:
        self.loop.call_at(at_s, act, *args)

    def tell(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.loop.now_s:7.2f} {text}")

    def violate(self, text: str) -> None:
        """End the schedule: production code cannot catch this."""
        self.tell(f"VIOLATION {text}")
        if self.loop.stop_reason is None:
            self.loop.stop_reason = Violation(text)

    # Simulated threads.

    def _offload(self, loop: SimulatedLoop, executor: Any, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Carry out a blocking call: a local one at once, one of the executor of transfers when its request arrives."""
        future = loop.create_future()
        process = current_process()
        is_transfer = isinstance(executor, ThreadPoolExecutor) and executor._thread_name_prefix.startswith("transfer")
        if not is_transfer:
            loop.call_soon(self._carry_out, process, call, future, loop.now_s, False)
            return future
        # It arrives also if its sender is killed meanwhile: so without the sender's context.
        loop.call_at(loop.now_s + self._way_s(), self._carry_out, process, call, future, loop.now_s, True, context=Context())
        return future

    def _carry_out(
        self, process: Process | None, call: Callable[[], Any], future: asyncio.Future[Any], issued_s: float, answers_late: bool
    ) -> None:
        loop = self.loop
        value, error = None, None
        self.acting, self.issued_s, self.is_stray, self.calls = process, issued_s, process is not None and process.is_dead, 0
        if self.is_stray and future.cancelled():
            return
        try:
            value = call()
        except Killed:
            return
        except Held:
            again = (process, call, future, loop.now_s + HELD_S, answers_late)
            loop.call_at(loop.now_s + HELD_S, self._carry_out, *again, context=Context())
            return
        except Exception as raised:
            error = raised
        finally:
            took_s, loop.skew_s = loop.skew_s, 0.0
            self.acting, self.is_stray = None, False
        if process is not None and process.is_dead:
            return
        if not answers_late:
            _resolve(future, value, error)
            return
        loop.call_at(loop.now_s + took_s + (self._way_s() if self.calls else 0.0), _resolve, future, value, error)

    def _way_s(self) -> float:
        chance = self.random.random()
        return SLOWEST_S * self.random.random() if chance < self.faults.slow else 0.01 + 0.1 * chance


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
