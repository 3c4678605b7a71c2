"""Hedged requests: when a request is late, and when a connection is silent, so that another connection is tried.

A connection can fail without a signal: a NAT entry expires, a load balancer is replaced. Only time reveals that, so the limits
bound the cost of such a connection. A slow or unreachable store looks the same to one request; the difference is that other
requests are not answered either. Every wait therefore grows with the time since the store's last answer.

A proxy may take bodies at once and forward them over a slow link: then all are late, while small requests are answered. A body
that is sent again takes a share of that link, so few are, and ever later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

UNKNOWN_S = 1.5
"""A request is late after this time while no latency of its kind is known. Seconds, as all ``_S``."""
LEAST_S = 0.75
"""No request is late before this time: threads of the lowest priority also wait for a core."""
LEAST_OF_KIND_S = {"DeleteObject": 4.0, "DeleteObjects": 4.0, "AbortMultipartUpload": 15.0}
"""No request of these kinds is late before this time. The abandoned try of a deletion, if it arrives later still, deletes what
was written since. Nobody waits for an abort, and a store may need a minute for many parts."""
COSTLY = frozenset({"CompleteMultipartUpload", "AbortMultipartUpload", "DeleteObjects"})
"""Requests whose work in the store grows with the number of parts or objects: it is done for each try, abandoned or not."""
BEYOND_S = 1.5
"""Upper bound of the lateness limit above the usual latency: half a second is left for another connection."""
BEYOND = 0.5
"""The same as a share of a long usual latency: bodies that share a slow link take turns."""
SILENT_S = 1.5
"""A connection that moves no byte of a body for this time is silent."""
LEAST_MOVED_BYTES = 4 << 10
"""Floor on progress: a connection that moves fewer bytes in ``SILENT_S`` trickles, and counts as silent."""
STEP_BYTES = 256 << 10
"""Bytes that a relay on the way may buffer at once: on a slow link, a connection pauses between two such steps."""
STEP_MOST_S = 4.0
"""Upper bound of the extra wait that a slow link earns."""
SLOWEST_BYTES_PER_S = 25_000
"""Below this rate, the link is not slow but has little to carry."""
BULK_BYTES = 16 << 10
"""Smaller pieces do not fill a link and are left out of the measured rate. From this size on, a request counts as a body."""
BODY_MOST_S = 600.0
"""Longest wait for the answer to a body while the store sends anything else: a proxy may forward the body slowly."""
FLOW_S, FLOW_LEAST_S, FLOW_EVERY_S = 3.0, 1.0, 0.1
"""Window of the measured rate, its minimum, and the interval between two samples while a connection waits, in seconds."""
HURRIED = 0.5
"""Factor of all these times after a termination notice."""
HOLD_S = 0.75
"""Time for which an error answer is held back while another try of the request may still succeed."""
CONFLICT, PRECONDITION_FAILED = 409, 412
"""Status where two tries of one conditional write collided in the store; where one came after the other."""
MIN_WAIT_S = 0.05
"""Shortest wait for an answer between two decisions about a hedge."""
AT_ONCE = 3
"""Maximum concurrent tries of a small request: the first, which a slow store still answers, and two on new connections."""
FEW_AT_ONCE = 2
"""Maximum concurrent tries of a request with a body, or with much work for the store."""
COPIED_BYTES_PER_S = 100e6
"""Assumed minimum rate of copies inside a store."""
KEPT = 32
"""Latencies kept per kind of request."""


class Latencies:
    """Recent latencies per kind of request, in seconds. Thread-safe."""

    def __init__(self) -> None:
        self._latencies_s: dict[str, deque[float]] = {}

    def took(self, kind: str, seconds: float) -> None:
        """Record the latency of an answer."""
        kept = self._latencies_s.get(kind)
        if kept is None:
            kept = self._latencies_s.setdefault(kind, deque(maxlen=KEPT))
        kept.append(seconds)

    def late_s(self, kind: str, *, hurried: bool = False) -> float:
        """Return after how many seconds a request of this kind is late."""
        usual_s = late_s(tuple(self._latencies_s.get(kind, ())), hurried=hurried)
        return max(usual_s, LEAST_OF_KIND_S.get(kind, 0.0))


def late_s(took: Sequence[float], *, hurried: bool = False) -> float:
    """Return after how many seconds a request is late.

    ``took``: recent latencies of its kind, in seconds; empty: unknown. ``hurried``: a termination notice was given.
    """
    share = HURRIED if hurried else 1.0
    if not took:
        return UNKNOWN_S * share
    ordered = sorted(took)
    usual, high = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
    return min(max(2 * high, LEAST_S * share), usual + max(BEYOND_S * share, BEYOND * usual))


def size_class(size_bytes: int) -> int:
    """Return the class of a body's size, by powers of two: its latencies and answers are compared with those of its class."""
    return size_bytes.bit_length()


class Quiet:
    """How long the store has sent nothing on any connection while requests waited. Times are monotonic seconds."""

    def __init__(self, *, most_s: float) -> None:
        """Start with no silence. ``most_s``: age in seconds after which a recorded silence expires unless confirmed again."""
        self.heard_s = float("-inf")
        """When bytes last moved on any connection. Written without a lock: the order of concurrent writes does not matter."""
        self._most_s = most_s
        self._since_s = float("-inf")
        self._seen_s = float("-inf")

    def fell_silent(self, *, since_s: float, now_s: float) -> None:
        """Record that a wait from ``since_s`` to ``now_s`` brought nothing."""
        if self._since_s <= self.heard_s or now_s - self._seen_s > self._most_s:
            self._since_s = since_s
        self._seen_s = now_s

    def before_s(self, began_s: float) -> float:
        """Return for how many seconds the store had been silent when a wait began; 0 if it has sent anything since."""
        if self._since_s <= self.heard_s or began_s - self._seen_s > self._most_s:
            return 0.0
        return max(0.0, began_s - self._since_s)


def next_try_s(late_after_s: float, *, tries: int, quiet_before_s: float, most_s: float, is_costly: bool = False) -> float:
    """Return how many seconds the latest try waits for its answer before the request is hedged.

    Args:
        late_after_s: Seconds after which a request of its kind is late.
        tries: Tries so far, from 1.
        quiet_before_s: Seconds for which the store had been silent when the latest try began to wait.
        most_s: Upper bound of the result.
        is_costly: The tries have sent a body (a proxy may have all of them, and forward them over a slow link), or the store
            has much work with each (``COSTLY``).
    """
    growing_s = late_after_s * (4.0 ** min(tries - 1, 5) if is_costly else 2.0 ** min(max(0, tries - 2), 10))
    return min(most_s, max(growing_s, quiet_before_s))


class Flow:
    """Recent throughput of all connections together, sampled while one of them waits. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def record(self, moved_bytes: int, *, now_s: float) -> None:
        """Record the total of bytes moved so far."""
        if not self._seen or now_s - self._seen[-1][0] >= FLOW_EVERY_S:
            self._seen.append((now_s, moved_bytes))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= FLOW_S:
            self._seen.popleft()

    def bytes_per_s(self, moved_bytes: int, *, now_s: float) -> float | None:
        """Return the recent rate, or ``None`` before enough samples."""
        if not self._seen or now_s - self._seen[0][0] < FLOW_LEAST_S:
            return None
        return (moved_bytes - self._seen[0][1]) / (now_s - self._seen[0][0])


def silent_s(
    *, tries: int, quiet_before_s: float, most_s: float, bytes_per_s: float | None, connections: int, hurried: bool = False
) -> float:
    """Return after how many seconds without a byte a connection that carries a body is silent.

    Args:
        tries: Connections that fell silent before with the same body.
        quiet_before_s: Seconds for which the store had been silent when this connection fell silent.
        most_s: Upper bound of the result.
        bytes_per_s: Recent throughput of all connections together; ``None``: unknown.
        connections: Number of connections that share it.
        hurried: A termination notice was given.
    """
    growing_s = SILENT_S * (HURRIED if hurried else 1.0) * 2.0 ** min(tries, 10)
    return min(most_s, max(growing_s, quiet_before_s, step_s(bytes_per_s, connections=connections)))


def step_s(bytes_per_s: float | None, *, connections: int) -> float:
    """Return for how many seconds one of several connections may pause on a slow link; 0 where it is not known to be slow.

    Args:
        bytes_per_s: Recent throughput of large bodies on all connections together; ``None``: unknown.
        connections: Number of connections that share it.
    """
    if bytes_per_s is None or bytes_per_s < SLOWEST_BYTES_PER_S:
        return 0.0
    return min(STEP_MOST_S, STEP_BYTES * max(1, connections) / bytes_per_s)


def is_moving(moved_bytes: int, *, in_s: float) -> bool:
    """Whether a connection reaches the floor on progress, ``LEAST_MOVED_BYTES`` per ``SILENT_S``, over ``in_s`` seconds."""
    return moved_bytes > 0 and moved_bytes * SILENT_S >= LEAST_MOVED_BYTES * in_s


def at_once(*, is_costly: bool) -> int:
    """Return the maximum number of concurrent tries of one request. ``is_costly``: as of ``next_try_s``."""
    return FEW_AT_ONCE if is_costly else AT_ONCE


def replaceable(are_hedges: Sequence[bool], *, most: int) -> list[int | None]:
    """Return which tries of a request may give their place up for another one, as indices, in order of preference.

    ``None``: no try has to. The first one is kept: a slow store will answer it. Where the budget has no further place, the
    request's own hedge gives its one up: it is silent, too, and what was cut may be whole again.

    Args:
        are_hedges: Of each try in flight, oldest first: whether it has a place of the budget.
        most: Maximum number of tries in flight (``at_once``).
    """
    if len(are_hedges) >= most:
        return [1]
    return [None, *[index for index, is_hedge in enumerate(are_hedges) if index and is_hedge][:1]]


def may_hedge(*, hedges: int, requests: int, is_quiet: bool, is_whole_body: bool = False) -> bool:
    """Whether the budget allows another hedge, or giving up a silent connection.

    If the store answers other requests, a late one has a bad connection. If it answers none, only few are hedged. Of bodies
    that were sent as a whole, few are hedged at a time: a fast store answers each of these hedges soon.

    Args:
        hedges: Tries in flight that are not the first of their request: of bodies that were sent as a whole, or of others.
        requests: Connections in use.
        is_quiet: The store has sent nothing since the request began to wait.
        is_whole_body: The request has a body, which was sent as a whole.
    """
    if is_whole_body:
        return hedges < max(1, requests // 6)
    return not is_quiet or hedges < max(2, requests // 4)


def is_given_up(waited_s: float, *, most_s: float, is_body: bool, heard_s_ago: float) -> bool:
    """Whether a request that is not answered has failed.

    Args:
        waited_s: Seconds since the last byte of any of its tries left.
        most_s: Seconds after which a request fails.
        is_body: It has a body of at least ``BULK_BYTES``. Sent again, it would have to pass the slow link once more.
        heard_s_ago: Seconds since a byte moved on any connection to the store.
    """
    return waited_s >= (BODY_MOST_S if is_body and heard_s_ago < most_s else most_s)


def may_be_undone(status: int) -> bool:
    """Whether an error answer may be followed by a success of another try in flight."""
    return status >= 500 or status in (CONFLICT, PRECONDITION_FAILED)


def connect_within_s(failures: int, *, first_s: float, most_s: float) -> float:
    """Return the deadline of a connection attempt in seconds, TLS included; it doubles with each consecutive failure."""
    return min(most_s, first_s * 2.0 ** min(failures, 10))


def address_order(families: Sequence[int], *, skipped: int) -> list[int]:
    """Return the order in which an attempt tries a host's addresses, as indices: one of each family in turn (RFC 8305, 4).

    Args:
        families: Family of each address, in the resolver's order.
        skipped: Addresses that earlier attempts began with; the order is rotated by as many.
    """
    nth = [families[:index].count(family) for index, family in enumerate(families)]
    in_turn = sorted(range(len(families)), key=lambda index: nth[index])
    first = skipped % max(1, len(in_turn))
    return in_turn[first:] + in_turn[:first]


def copy_within_s(size_bytes: int) -> float:
    """Return the deadline in seconds of a copy inside the store: after it, sending the bytes is at least as fast.

    A copy is not hedged: the store would do all of the work twice.
    """
    return UNKNOWN_S + size_bytes / COPIED_BYTES_PER_S
