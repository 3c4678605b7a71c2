"""Measurement of the rates to and from a store, in a few seconds and with a bounded number of bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sidecar.errors import Stopped
from sidecar.standalone.session import StoreSession
from sidecar.store.slice import BLOCK_BYTES, FileSlice
from sidecar.transfer.rate_gate import RateGate
from sidecar.volume.descriptors import opened

OBJECTS, OBJECT_BYTES = 8, 8 << 20
"""64 MiB in all, in objects of the usual size of a part."""
AT_ONCE = 4
"""Concurrent requests, with as many as a sidecar begins."""
MOST_S = 3.0
"""Seconds after which each direction ends."""
END_WITHIN_S = 5.0
"""Seconds that a stopped request gets to end."""


class _Meter:
    """Gate of the transfers of one direction: counts bytes, and stops them after ``MOST_S``."""

    def __init__(self, limit: RateGate | None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._began_s = time.monotonic()
        self._bytes = 0
        self._stopped = False

    def pass_through(self, size_bytes: int) -> None:
        """Count bytes, at the configured bandwidth limit.

        Raises:
            Stopped: The time is over.
        """
        if self._stopped or time.monotonic() - self._began_s > MOST_S:
            raise Stopped("the measurement has ended")
        if self._limit is not None:
            self._limit.pass_through(size_bytes)
        with self._lock:
            self._bytes += size_bytes

    def stop(self) -> None:
        """Stop all transfers at their next block."""
        self._stopped = True

    def bytes_per_s(self) -> float:
        """Return the rate since the beginning, in bytes per second."""
        return self._bytes / max(time.monotonic() - self._began_s, 1e-6)


class RateMeasurement:
    """Uploads objects below ``base`` and downloads them. It adds their keys to ``written``; the caller deletes them."""

    def __init__(self, session: StoreSession, base: str, written: set[str]) -> None:
        self._session = session
        self._keys = [f"{base}-rate-{number}" for number in range(OBJECTS)]
        self._written = written
        self._meter = _Meter(None)
        self._running = 0
        self._idle = threading.Condition()

    async def measure(self) -> tuple[float, float | None]:
        """Return the rates up and down in bytes per second; down is ``None`` if no upload was complete in time.

        Raises:
            StoreError: A request failed.
        """
        fd = os.memfd_create("doctor-rate")
        try:
            os.write(fd, os.urandom(OBJECT_BYTES))  # nothing on the way can compress it
            up, complete = await self._measured(lambda key: self._put(key, fd), self._keys, limit=self._session.executor.gate)
        finally:
            os.close(fd)
        down = (await self._measured(self._get, complete, limit=None))[0] if complete else None
        return up, down

    def end(self) -> None:
        """End transfers in flight at their next block, and wait: what arrives later could not be deleted. Blocks."""
        self._meter.stop()
        with self._idle:
            self._idle.wait_for(self._is_idle, timeout=END_WITHIN_S)

    def _is_idle(self) -> bool:
        return not self._running

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._idle:
            self._running += 1
        try:
            yield
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    async def _measured(
        self, call: Callable[[str], None], keys: list[str], *, limit: RateGate | None
    ) -> tuple[float, list[str]]:
        left, complete = list(reversed(keys)), list[str]()
        meter = self._meter = _Meter(limit)

        async def one_after_another() -> None:
            while left:
                key = left.pop()
                try:
                    await self._session.executor.once(call, key)
                except Stopped:
                    return
                complete.append(key)

        await self._session.executor.together([one_after_another() for _ in range(AT_ONCE)])
        return meter.bytes_per_s(), complete

    def _put(self, key: str, fd: int) -> None:
        with self._counted():
            self._meter.pass_through(0)
            self._written.add(key)
            with opened(os.dup(fd)) as own:
                body = FileSlice(own, 0, OBJECT_BYTES, gate=self._meter, name="doctor", with_md5=True)
                self._session.store.put_file(key, body)

    def _get(self, key: str) -> None:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        with self._session.store.read(key, length=OBJECT_BYTES) as body:
            while count := body.readinto(buffer):
                self._meter.pass_through(count)
