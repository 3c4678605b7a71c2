"""Gates of uploads: rate limit of all sent bytes, pause of one checkpoint's bytes, preemption of one file's retries."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from sidecar.errors import Stopped


@dataclass(slots=True)
class _Counter:
    """Bytes that one thread sent. Only that thread writes it, so no lock is needed."""

    passed_bytes: int


class RateGate:
    """Rate limit of all sent bytes, in bytes per second, and their stop switch. A new limit applies to waiting threads."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._condition = threading.Condition()
        self.bytes_per_s = bytes_per_s
        """The limit, which ``limit`` changes; ``None``: unlimited."""
        self._closed = False
        self._free_at_s = 0.0
        self._changes = 0
        """Changes of the limit so far."""
        self._own = threading.local()
        self._counters: list[_Counter] = []

    @property
    def passed_bytes(self) -> int:
        """Bytes sent so far, with and without a limit."""
        return sum(counter.passed_bytes for counter in self._counters)

    def limit(self, bytes_per_s: int | None) -> None:
        """Change the limit; ``None`` lifts it."""
        with self._condition:
            self.bytes_per_s = bytes_per_s
            self._free_at_s = 0.0
            self._changes += 1
            self._condition.notify_all()

    def close(self) -> None:
        """Stop every transfer at its next block."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise if the gate is closed. For downloads, which are not rate-limited.

        Raises:
            Stopped: The gate is closed.
        """
        if self._closed:
            raise Stopped("transfers were stopped")

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent.

        Raises:
            Stopped: The gate is closed.
        """
        if self.bytes_per_s is not None:  # without a limit, threads do not contend for the lock
            self._wait_for_rate(size_bytes)
        self.check()
        self._count(size_bytes)

    def _wait_for_rate(self, size_bytes: int) -> None:
        with self._condition:
            while self.bytes_per_s is not None and not self._closed:
                # Idle time earns no credit, so that a pause is not followed by a burst.
                self._free_at_s = max(self._free_at_s, time.monotonic())
                mine_s, changes = self._free_at_s, self._changes
                self._free_at_s += size_bytes / self.bytes_per_s
                while (left_s := mine_s - time.monotonic()) > 0 and (self._changes, self._closed) == (changes, False):
                    self._condition.wait(left_s)
                if changes == self._changes:  # else: the next turn is counted by the new limit
                    return

    def _count(self, size_bytes: int) -> None:
        try:
            self._own.counter.passed_bytes += size_bytes
        except AttributeError:  # the first block of this thread
            self._own.counter = _Counter(size_bytes)
            self._counters.append(self._own.counter)

    def wait_while(self, is_paused: Callable[[], bool]) -> None:
        """Wait until ``is_paused`` returns False. It is evaluated again after each ``wake``.

        Raises:
            Stopped: The gate is closed.
        """
        if not is_paused():  # the usual case, without the lock that all threads would contend for at each block
            self.check()
            return
        with self._condition:
            while is_paused() and not self._closed:
                self._condition.wait()
            self.check()

    def wake(self) -> None:
        """Let all waiting threads evaluate their condition again."""
        with self._condition:
            self._condition.notify_all()


class PauseGate:
    """Gate of one checkpoint's bytes: counts them, and can pause them in the middle of a request."""

    def __init__(self, gate: RateGate) -> None:
        self._gate = gate
        self._counting = threading.Lock()
        self.is_paused = False
        """The checkpoint's bytes are paused."""
        self._exempt = 0
        self._exempt_threads: set[int] = set()
        """Ids of the threads that are exempt from the pause."""
        self.passed_bytes = 0

    def set_paused(self, paused: bool, *, exempt: int = 0) -> None:
        """Pause the checkpoint's bytes, or let them pass again. Bytes that the kernel has taken are sent nevertheless.

        ``exempt``: number of in-flight requests allowed to finish, because other uploads wait for their connections.
        """
        if (paused, exempt) != (self.is_paused, self._exempt):
            self.is_paused, self._exempt = paused, exempt
            self._exempt_threads = self._exempt_threads if paused else set()
            self._gate.wake()

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent.

        Raises:
            Stopped: The gate is closed.
        """
        self._gate.wait_while(self._pauses_thread)
        self._gate.pass_through(size_bytes)
        with self._counting:
            self.passed_bytes += size_bytes

    def _pauses_thread(self) -> bool:
        thread, exempt_threads = threading.get_ident(), self._exempt_threads
        if self.is_paused and len(exempt_threads) < self._exempt:
            exempt_threads.add(thread)
        return self.is_paused and thread not in exempt_threads


class RetryGate:
    """Preemption state of one transfer's retry loop."""

    def __init__(self, on_refusal: Callable[[], object]) -> None:
        """``on_refusal``: called when the store begins to refuse the file, or accepts it again."""
        self._changed = asyncio.Event()
        self._on_refusal = on_refusal
        self.behind = False
        """Another upload has priority: the loop ends at the next failure."""
        self.refused = False
        """The store refused the latest request: waiting alone will not help."""

    def put(self, *, behind: bool) -> None:
        """Set whether another upload has priority; if it has now, wake the loop's pause."""
        if behind and not self.behind:
            self.wake()
        self.behind = behind

    def wake(self) -> None:
        """End the loop's pause: it tries again now, or ends if another upload has priority."""
        self._changed.set()
        self._changed = asyncio.Event()

    def woken(self) -> Coroutine[Any, Any, object]:
        """Return what waits for ``wake``, from this call on, whenever it is awaited."""
        return self._changed.wait()

    def answered(self, *, refused: bool) -> None:
        """Record the store's answer; notify when it differs from the one before."""
        if refused != self.refused:
            self.refused = refused
            self._on_refusal()
