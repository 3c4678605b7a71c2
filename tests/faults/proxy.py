"""A proxy between a sidecar and an S3 server that does harm by plan, in mid-stream, and writes down what passed.

Heads go through as they are, Host included, because the client signs it; only what concerns a single connection is the
proxy's own: "Expect" is answered here, the store gets one connection per request, and the client's are kept alive.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.faults.plan import Fault, Kind, Plan, nothing
from tests.faults.wire import BUFFER_BYTES, Head, Peer, Request

_ERRORS = {
    Kind.ERROR_500: (500, "InternalError"),
    Kind.SLOW_DOWN: (503, "SlowDown"),
    Kind.SLOW_DOWN_EARLY: (503, "SlowDown"),
    Kind.TOO_MANY: (429, "TooManyRequests"),
    Kind.ERROR_IN_200: (200, "InternalError"),
}
_BARE = {Kind.BARE_404: (404, "Not Found"), Kind.BARE_502: (502, "Bad Gateway")}
_HARM_TO_UPLOADS = {
    Kind.RESET_UPLOAD,
    Kind.STALL_UPLOAD,
    Kind.STALL_UPLOAD_CLOSE,
    Kind.CORRUPT_UPLOAD,
    Kind.SILENT_UPLOAD,
}
_CORRUPTIONS = {Kind.CORRUPT_UPLOAD, Kind.CORRUPT_DOWNLOAD}
_RESETS = {Kind.RESET_UPLOAD, Kind.RESET_DOWNLOAD}
_STALLS = {Kind.STALL_UPLOAD, Kind.STALL_DOWNLOAD}
_SILENT_IN_BODIES = {Kind.SILENT_UPLOAD, Kind.SILENT_DOWNLOAD}
_STALLS_THAT_END = {Kind.STALL_UPLOAD_CLOSE, Kind.STALL_DOWNLOAD_CLOSE}


class Cut(Exception):
    """The plan ends the client's connection here."""

    def __init__(self, fault: Fault, *, reset: bool) -> None:
        super().__init__()
        self.reset = reset
        fault.on_cut()


@dataclass
class Exchange:
    """A request, and what became of it so far."""

    request: Request
    fault: Fault | None
    connection: int = 0
    """In the order in which they came, from 1 on."""
    began_s: float = field(default_factory=time.monotonic)
    received_bytes: int = 0
    """Of the request's body."""
    returned_bytes: int = 0
    """Of the answer's body."""
    store_status: int | None = None
    """What the store answered; None: it was not asked, or did not answer."""
    status: int | None = None
    """What the client was answered."""

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def operation(self) -> str:
        return self.request.operation


class Dialect:
    """What an S3 server does differently from the one behind the proxy. Bodies keep their length."""

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """Return status and code for a request that this server does not take."""

    def request(self, head: Head) -> Head:
        return head

    def request_body(self, request: Request, blocks: Iterator[bytes]) -> Iterator[bytes]:
        return blocks

    def answer(self, head: Head) -> Head:
        return head

    def answer_body(self, head: Head, blocks: Iterator[bytes]) -> Iterator[bytes]:
        return blocks


class Throttle:
    """A rate that all connections share."""

    def __init__(self, stopping: threading.Event) -> None:
        self.bytes_per_s: float | None = None
        self._stopping = stopping
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def wait(self, size_bytes: int) -> None:
        if self.bytes_per_s is None:
            return
        with self._lock:
            mine_s = self._free_at_s = max(self._free_at_s, time.monotonic()) + size_bytes / self.bytes_per_s
        self._stopping.wait(max(0.0, mine_s - time.monotonic()))


class FaultProxy:
    """Stands before the S3 server ``target``. What is public may change at any time, but for ``log`` and ``silenced``."""

    def __init__(self, target: str, plan: Plan = nothing, *, dialect: Dialect | None = None) -> None:
        self.plan = plan
        self.latency_s = 0.0
        """Added to every request."""
        self.silences: dict[int, Kind] = {}
        """Which connections go silent, in the order in which they come, from 1 on, and where."""
        self.silenced: list[tuple[int, Kind]] = []
        """Those that did."""
        self.buffers_bodies = False
        """Take a whole body before the store gets it, as an ingress does: the rate is that of the way behind the proxy."""
        self.on_answer: Callable[[Exchange], object] = lambda _: None
        """Called when the store has answered and the client does not know it yet."""
        self.log: list[Exchange] = []
        self._dialect = dialect or Dialect()
        self._target = urlsplit(target)
        self._stopping = threading.Event()
        self._throttle = Throttle(self._stopping)
        self._peers: set[Peer] = set()
        self._threads: list[threading.Thread] = []

    @property
    def bytes_per_s(self) -> float | None:
        """Limit of all bodies of both directions together."""
        return self._throttle.bytes_per_s

    @bytes_per_s.setter
    def bytes_per_s(self, value: float | None) -> None:
        self._throttle.bytes_per_s = value

    @contextlib.contextmanager
    def running(self, address: str = "127.0.0.1") -> Iterator[str]:
        """Yield the endpoint."""
        with socket.create_server((address, 0), backlog=128) as server:
            # Accepted connections inherit them.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            accepting = threading.Thread(target=self._accept, args=(server,))
            accepting.start()
            try:
                yield f"http://{address}:{server.getsockname()[1]}"
            finally:
                self._stopping.set()
                server.shutdown(socket.SHUT_RDWR)
                accepting.join()
                for peer in list(self._peers):
                    peer.close()
                for thread in self._threads:
                    thread.join()

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = Peer(server.accept()[0])
                thread = threading.Thread(target=self._serve, args=(client, len(self._threads) + 1))
                self._threads.append(thread)
                thread.start()

    @contextlib.contextmanager
    def _known(self, peer: Peer) -> Iterator[Peer]:
        self._peers.add(peer)
        try:
            yield peer
        finally:
            self._peers.discard(peer)
            peer.close()

    def _secured(self, client: Peer) -> Peer:
        """Return the connection as requests come through it."""
        return client

    def _serve(self, client: Peer, number: int) -> None:
        silence = self.silences.get(number)
        with self._known(client), contextlib.suppress(OSError):
            try:
                if silence is Kind.SILENT_CONNECTION:
                    self._fall_silent(number, Fault(silence))
                client = self._secured(client)
                while not self._stopping.is_set() and (head := client.head()):
                    request = Request(head.first, head.headers)
                    planned = silence in (None, Kind.SILENT_WHEN_KEPT)
                    fault = Fault(silence) if silence and not planned else self.plan(request)
                    exchange = Exchange(request, fault, number)
                    self.log.append(exchange)
                    if not self._exchange(client, exchange):
                        return
                    if silence is Kind.SILENT_WHEN_KEPT:
                        self._fall_silent(number, Fault(silence))
            except Cut as cut:
                if cut.reset:
                    client.reset()

    def _exchange(self, client: Peer, exchange: Exchange) -> bool:
        """Answer one request. Returns whether the connection stays."""
        request, kind = exchange.request, exchange.fault.kind if exchange.fault else None
        self._stopping.wait(self.latency_s)
        if kind is Kind.RESET_BEFORE and exchange.fault:
            raise Cut(exchange.fault, reset=True)
        if kind is Kind.SLOW_DOWN_EARLY:
            return self._refuse(client, exchange, *_ERRORS[kind], stays=False)
        if kind is Kind.LATENCY and exchange.fault:
            self._stopping.wait(exchange.fault.seconds)
        if exchange.fault and (kind is Kind.SILENT_REQUEST or (kind is Kind.SILENT_UPLOAD and not request.length)):
            self._fall_silent(exchange.connection, exchange.fault)
        refusal = (_ERRORS | _BARE).get(kind) if kind else self._dialect.refusal(request)
        if refusal:
            for _ in self._received(client, exchange):
                pass
            return self._refuse(client, exchange, *refusal, stays=True, bare=kind in _BARE)
        with self._known(Peer(self._connect())) as store:
            self._ask(client, store, exchange)
            return self._pass_on(client, store, exchange) and kind is not Kind.CLOSED_AFTER

    def _connect(self) -> socket.socket:
        return socket.create_connection((self._target.hostname, self._target.port))

    def _refuse(self, client: Peer, exchange: Exchange, status: int, code: str, *, stays: bool, bare: bool = False) -> bool:
        document = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as planned</Message></Error>"
        body = (f"<html><body>{code}</body></html>" if bare else document).encode()
        content_type = "text/html" if bare else "application/xml"
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        headers += [] if stays else [("Connection", "close")]
        exchange.status = status
        client.send(Head(f"HTTP/1.1 {status} {code}", headers).encode())
        if exchange.request.method != "HEAD":
            client.send(body)
        return stays

    def _received(self, client: Peer, exchange: Exchange) -> Iterator[bytes]:
        request = exchange.request
        if request.get("expect"):
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        for block in client.body(request):
            if not self.buffers_bodies:
                self._throttle.wait(len(block))
            exchange.received_bytes += len(block)
            yield block

    def _ask(self, client: Peer, store: Peer, exchange: Exchange) -> None:
        request, fault = exchange.request, exchange.fault
        blocks = self._dialect.request_body(request, self._received(client, exchange))
        if fault and fault.kind in _HARM_TO_UPLOADS:
            blocks = self._harmed(blocks, exchange, fault, request.length or 0)
        if self.buffers_bodies:
            blocks = self._slowly(list(blocks))
        send = _chunk_to(store) if request.is_chunked else store.send
        store.send(self._dialect.request(request.without("expect")).encode())
        for block in blocks:
            send(block)
        if request.is_chunked:
            send(b"")

    def _slowly(self, blocks: list[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self._throttle.wait(len(block))
            yield block

    def _pass_on(self, client: Peer, store: Peer, exchange: Exchange) -> bool:
        head = self._dialect.answer(store.answer())
        exchange.store_status = head.status
        self.on_answer(exchange)
        has_body = exchange.request.method != "HEAD" and head.status not in (204, 304)
        blocks = self._dialect.answer_body(head, store.body(head, to_the_end=True) if has_body else iter(()))
        fault = exchange.fault
        if fault and (
            fault.kind is Kind.SILENT_ANSWER or (fault.kind is Kind.SILENT_DOWNLOAD and not (has_body and head.length))
        ):
            self._fall_silent(exchange.connection, fault)
        if fault and fault.kind is Kind.LOST_ANSWER:
            for _ in blocks:
                pass
            raise Cut(fault, reset=False)
        if fault and has_body and "download" in fault.kind:
            blocks = self._harmed(blocks, exchange, fault, 1000 if head.length is None else head.length)
        has_end = not has_body or head.is_chunked or head.length is not None
        exchange.status = head.status
        client.send(_kept_alive(head, has_end=has_end).encode())
        send = _chunk_to(client) if head.is_chunked else client.send
        for block in blocks:
            self._throttle.wait(len(block))
            send(block)
            exchange.returned_bytes += len(block)
        if has_body and head.is_chunked:
            send(b"")
        return has_end

    def _harmed(self, blocks: Iterator[bytes], exchange: Exchange, fault: Fault, size_bytes: int) -> Iterator[bytes]:
        at, done, is_left = max(0, min(int(size_bytes * fault.at), size_bytes - 1)), 0, True
        for block in blocks:
            if is_left and done + len(block) > at:
                is_left, place = False, at - done
                if place:
                    yield block[:place]
                self._harm(exchange, fault)
                yield bytes([block[place] ^ (fault.kind in _CORRUPTIONS)]) + block[place + 1 :]
            else:
                yield block
            done += len(block)
        if is_left:
            self._harm(exchange, fault)

    def _fall_silent(self, number: int, fault: Fault) -> None:
        self.silenced.append((number, fault.kind))
        self._stopping.wait()
        raise Cut(fault, reset=True)

    def _harm(self, exchange: Exchange, fault: Fault) -> None:
        if fault.kind in _SILENT_IN_BODIES:
            self._fall_silent(exchange.connection, fault)
        if fault.kind in _STALLS | _STALLS_THAT_END:
            self._stopping.wait(fault.seconds)
        if fault.kind not in _STALLS | _CORRUPTIONS:
            raise Cut(fault, reset=fault.kind in _RESETS)


def _chunk_to(peer: Peer) -> Callable[[bytes], None]:
    """Send in chunks; an empty one is the end."""
    return lambda block: peer.send(f"{len(block):x}\r\n".encode() + block + b"\r\n")


def _kept_alive(head: Head, *, has_end: bool) -> Head:
    _, _, status = head.first.partition(" ")
    kept = Head(f"HTTP/1.1 {status}", head.without("connection", "keep-alive").headers)
    return kept if has_end else Head(kept.first, [*kept.headers, ("Connection", "close")])
