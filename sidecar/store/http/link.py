"""A connected socket that detects a silent connection.

The kernel waits at most ``TICK_S`` per call (``SO_RCVTIMEO``, ``SO_SNDTIMEO``). While bytes move, this needs no system call
beyond those that move them.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sidecar.core.schedule import hedging

T = TypeVar("T")

TICK_S = 0.25
"""Kernel's wait per call in seconds; after each it is decided whether the connection is silent."""
ABORTIVE = struct.pack("ii", 1, 0)
"""``SO_LINGER`` that makes ``close`` reset a connection."""


class Silent(TimeoutError):
    """A connection moved no byte for longer than allowed. ``seconds``: for how long. It holds a slot of the hedge budget."""

    def __init__(self, text: str, seconds: float) -> None:
        super().__init__(text)
        self.seconds = seconds


class Hedged(Protocol):
    """One try of a request."""

    is_hedge: bool
    """It has a slot of the hedge budget."""


H = TypeVar("H", bound=Hedged)


@dataclass(frozen=True, slots=True)
class Place(Generic[H]):
    """A slot of the hedge budget. ``replaced``: the try to give up, whose slot it may be; ``None``: none."""

    replaced: H | None


class Pulse:
    """State shared by all connections to a store: the time of its last sign of life, latencies, throughput, hedge budget."""

    def __init__(self, *, most_s: float) -> None:
        """Start without measurements. ``most_s``: longest wait for any answer, in seconds."""
        self.most_s = most_s
        self.hurried = False
        """A termination notice was given: waits are shorter."""
        self.connections = 0
        """Number of connections of the wire in use."""
        self.calls = 0
        """Number of small requests in flight beside them. Written by their event loop alone."""
        self.moved_bytes = 0
        """Bytes of large bodies sent and received; approximate, because threads add to it without a lock."""
        self.quiet = hedging.Quiet(most_s=most_s)
        self.flow = hedging.Flow()
        self.latencies = hedging.Latencies()
        self._lock = threading.Lock()
        self._hedges = 0
        self._body_hedges = 0
        """The same of bodies that were sent as a whole."""

    def late_s(self, kind: str) -> float:
        """Return after how many seconds a request of this kind is late."""
        return self.latencies.late_s(kind, hurried=self.hurried)

    def begin_hedge(self, *, waiting_since_s: float, now_s: float, is_whole_body: bool = False, replaces: bool = False) -> bool:
        """Take a slot of the hedge budget. Returns False if none is free, unless the request waited for too long.

        Args:
            waiting_since_s: When the request's latest try began to wait, monotonic seconds.
            now_s: Now, monotonic seconds.
            is_whole_body: The request has a body, which was sent as a whole.
            replaces: The hedge takes the place of an earlier one of the same request, which is given up for it.
        """
        with self._lock:
            is_quiet = self.quiet.heard_s < waiting_since_s and now_s - waiting_since_s < self.most_s
            requests = self.connections + self.calls
            hedges = (self._body_hedges if is_whole_body else self._hedges) - replaces
            may = hedging.may_hedge(hedges=hedges, requests=requests, is_quiet=is_quiet, is_whole_body=is_whole_body)
            self._count(may, is_whole_body=is_whole_body)
        return may

    def place_of_hedge(
        self, tries: Sequence[H], *, at_once: int, waiting_since_s: float, now_s: float, is_whole_body: bool = False
    ) -> Place[H] | None:
        """Take a slot of the hedge budget for another try of a request; ``None``: none is free. See ``hedging.replaceable``.

        Args:
            tries: The request's tries in flight, oldest first.
            at_once: Maximum number of them.
            waiting_since_s: When the latest one began to wait, monotonic seconds.
            now_s: Now, monotonic seconds.
            is_whole_body: As of ``begin_hedge``.
        """
        for index in hedging.replaceable([attempt.is_hedge for attempt in tries], most=at_once):
            replaced = None if index is None else tries[index]
            replaces = replaced is not None and replaced.is_hedge
            if self.begin_hedge(waiting_since_s=waiting_since_s, now_s=now_s, is_whole_body=is_whole_body, replaces=replaces):
                return Place(replaced)
        return None

    def _count(self, change: int, *, is_whole_body: bool) -> None:
        if is_whole_body:
            self._body_hedges += change
        else:
            self._hedges += change

    def step_s(self, now_s: float) -> float:
        """Return the seconds for which a connection with a body may pause on a slow link; 0 where the link is not slow."""
        rate = self.flow.bytes_per_s(self.moved_bytes, now_s=now_s)
        return hedging.step_s(rate, connections=self.connections)

    def is_silent(self, *, tries: int, still_s: float, now_s: float) -> bool:
        """Whether to give up a connection that moved no byte since ``still_s``; if True, a slot for a hedge is taken."""
        self.flow.record(self.moved_bytes, now_s=now_s)
        longest_s = hedging.silent_s(
            tries=tries,
            quiet_before_s=self.quiet.before_s(still_s),
            most_s=self.most_s,
            bytes_per_s=self.flow.bytes_per_s(self.moved_bytes, now_s=now_s),
            connections=self.connections,
            hurried=self.hurried,
        )
        return now_s - still_s >= longest_s and self.begin_hedge(waiting_since_s=still_s, now_s=now_s, replaces=tries > 0)

    def end_hedge(self, *, is_whole_body: bool = False) -> None:
        """Return a slot to the hedge budget."""
        with self._lock:
            self._count(-1, is_whole_body=is_whole_body)


class Link(socket.socket):
    """A connected socket. ``patient``: reads wait until the connection is silent; else ``BlockingIOError`` after a tick."""

    def __init__(self, connected: socket.socket, pulse: Pulse, *, name: str) -> None:
        """Take over a connected socket."""
        super().__init__(fileno=connected.detach())
        self.patient = True
        self.tries = 0
        """Connections that fell silent before with the same body."""
        self.holds_place = False
        """It fell silent, and holds a slot of the hedge budget until its request has ended."""
        self._pulse = pulse
        self._name = name
        self._waited_s = 0.0
        """Seconds that reads waited while fewer than ``LEAST_MOVED_BYTES`` arrived."""
        self._came_bytes = 0
        self._may_trickle = True

    @property
    def link(self) -> Link:
        """This socket; the counterpart of ``TlsConnection.link``."""
        return self

    def let_the_kernel_wait(self) -> None:
        """Use the kernel's timeouts instead of Python's, which poll before each call: one system call instead of two."""
        self.settimeout(None)
        tick = struct.pack("@ll", int(TICK_S), int(TICK_S % 1 * 1e6))
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)

    def sendall(self, data: bytes | memoryview, flags: int = 0) -> None:  # type: ignore[override]
        """Send all of ``data``.

        Raises:
            Silent: The send buffer does not drain any more.
        """
        try:
            count = self.send(data, flags)
        except BlockingIOError:
            count = 0
        if count >= hedging.BULK_BYTES:
            self._pulse.moved_bytes += count
        if count < len(data):
            self._send_slowly(memoryview(data)[count:])

    def _send_slowly(self, left: memoryview) -> None:
        queued, still_s = self.queued_bytes(), time.monotonic()
        while left:
            try:
                count = self.send(left)
            except BlockingIOError:
                now_s, before = time.monotonic(), queued
                queued = self.queued_bytes()
                if queued <= before - hedging.LEAST_MOVED_BYTES:  # draining, though too little for the kernel to take more
                    still_s = now_s
                    self._pulse.quiet.heard_s = now_s
                else:
                    queued = before
                    self._unless_silent("the send buffer hardly drained", still_s, now_s)
            else:
                left, still_s, queued = left[count:], time.monotonic(), self.queued_bytes()
                if count >= hedging.BULK_BYTES:
                    self._pulse.moved_bytes += count
                self._pulse.quiet.heard_s = still_s
                self._pulse.flow.record(self._pulse.moved_bytes, now_s=still_s)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Wait for bytes and return up to ``bufsize`` of them; empty at EOF. Raises as ``recv_into``."""
        began_s = time.monotonic()
        try:
            received = super().recv(bufsize, flags)
        except BlockingIOError:
            if not self.patient:
                raise
            received = self._receive_slowly(lambda: super(Link, self).recv(bufsize, flags))
        if self.patient and received:
            self._unless_it_trickles(len(received), began_s, time.monotonic())
        return received

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:  # type: ignore[override]
        """Fill the beginning of ``buffer`` and return the count; 0 at EOF.

        Raises:
            Silent: No byte, or hardly any, arrived for longer than allowed.
            BlockingIOError: Nothing arrived within a tick, and the link is not ``patient``.
        """
        began_s = time.monotonic()
        try:
            count = super().recv_into(buffer, nbytes, flags)
        except BlockingIOError:
            if not self.patient:
                raise
            count = self._receive_slowly(lambda: super(Link, self).recv_into(buffer, nbytes, flags))
        return self._received(count, began_s)

    def recv_a_moment(self, buffer: memoryview) -> int:
        """Fill the beginning of ``buffer`` without waiting beyond a tick, and return the count; 0 at EOF.

        Raises:
            BlockingIOError: Nothing arrived yet.
            Silent: Hardly any byte arrived for longer than allowed.
        """
        began_s = time.monotonic()
        return self._received(super().recv_into(buffer), began_s)

    def _received(self, count: int, began_s: float) -> int:
        if count >= hedging.BULK_BYTES:
            self._pulse.moved_bytes += count
        self._pulse.quiet.heard_s = now_s = time.monotonic()
        if self.patient and count:
            self._unless_it_trickles(count, began_s, now_s)
        return count

    def peek(self, size_bytes: int) -> bytes:
        """Return up to ``size_bytes`` of what has arrived, and leave it there; empty at EOF, or if nothing has arrived."""
        with suppress(BlockingIOError):
            return super().recv(size_bytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return b""

    def begin(self, tries: int, *, may_trickle: bool) -> None:
        """Reset the counters for a new request.

        Args:
            tries: Connections that fell silent before with the same body.
            may_trickle: The answer may arrive slowly: the floor on progress does not apply to it.
        """
        self.patient, self.tries, self._may_trickle = True, tries, may_trickle
        self._waited_s, self._came_bytes = 0.0, 0

    def _unless_it_trickles(self, count: int, began_s: float, now_s: float) -> None:
        if self._may_trickle or count >= hedging.LEAST_MOVED_BYTES:
            self._waited_s, self._came_bytes = 0.0, 0
            return
        self._waited_s, self._came_bytes = self._waited_s + now_s - began_s, self._came_bytes + count
        if self._came_bytes >= hedging.LEAST_MOVED_BYTES:
            self._waited_s, self._came_bytes = 0.0, 0
        elif self._waited_s >= hedging.SILENT_S * hedging.HURRIED:
            self._unless_silent(f"only {self._came_bytes} bytes arrived", now_s - self._waited_s, now_s)

    def _receive_slowly(self, receive: Callable[[], T]) -> T:
        still_s = time.monotonic() - TICK_S
        while True:
            try:
                return receive()
            except BlockingIOError:
                self._unless_silent("the rest of the answer does not come: no byte arrived", still_s, time.monotonic())

    def queued_bytes(self) -> int:
        """Return the bytes in the kernel's send buffer that the peer has not acknowledged."""
        return queued_bytes(self.fileno())

    def forget_queue(self) -> None:
        """Make ``close`` reset the connection, so that unsent bytes in the kernel are dropped."""
        with suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTIVE)

    def abandon(self) -> None:
        """Interrupt the thread that uses the socket; that thread then closes it."""
        self.forget_queue()
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def _unless_silent(self, what: str, still_s: float, now_s: float) -> None:
        if self._pulse.is_silent(tries=self.tries, still_s=still_s, now_s=now_s):
            self._pulse.quiet.fell_silent(since_s=still_s, now_s=now_s)
            self.holds_place = True
            raise Silent(f"{self._name}: {what} for {now_s - still_s:.1f} s", now_s - still_s)


def queued_bytes(fd: int) -> int:
    """Return the bytes in a socket's send buffer that the peer has not acknowledged; 0 for one that is closed."""
    try:
        queued: int = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, b"\0\0\0\0"))[0]
    except OSError:
        return 0
    return queued
