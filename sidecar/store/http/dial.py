"""New connections. Name resolution, TCP, a proxy's tunnel and TLS share one deadline; a late attempt is hedged."""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from sidecar.core.schedule import hedging
from sidecar.store.http.answer import Connection
from sidecar.store.http.link import Link, Pulse
from sidecar.store.http.proxy import HttpProxy
from sidecar.store.http.tls import TlsConnection
from sidecar.thread_pool import MORE_THREADS

NOT_SENT_BYTES = 512 << 10
"""Maximum unsent bytes in the kernel's send buffer, per connection."""
CHECK_NEED_S = 0.1
"""Interval in seconds at which ``dial`` asks ``unless`` whether its connection is still needed."""
_KIND = "connect"


class CannotConnect(OSError):
    """No connection could be made. The text names the peer and the reason."""


class NotNeeded(Exception):
    """The request was answered over another connection, so this one is not needed."""


class Dialler:
    """Makes connections. Thread-safe. Each attempt has its own thread, because name resolution cannot be cancelled."""

    def __init__(
        self, *, tls: ssl.SSLContext, connect_timeout_s: float, pulse: Pulse, proxy_of: Callable[[str], HttpProxy | None]
    ) -> None:
        self._tls = tls
        self._first_s = connect_timeout_s
        self._pulse = pulse
        self._proxy_of = proxy_of
        self._failures = 0
        self._skipped = 0
        """How many of a host's addresses the next dial passes over at first: those before did not answer."""
        self._lock = threading.Lock()
        self._under_way: set[_Dialling] = set()
        self._closed = False

    def dial(self, origin: str, *, unless: Callable[[], bool] = lambda: False) -> Connection:
        """Return a new connection.

        ``origin``: ``scheme://host:port``. ``unless``: called every ``CHECK_NEED_S`` seconds; True: the connection is no longer
        needed.

        Raises:
            CannotConnect, TimeoutError: The text names the peer and the reason.
            NotNeeded: ``unless`` returned True.
            OSError: TLS failed, or ``close`` was called.
        """
        within_s = hedging.connect_within_s(self._failures, first_s=self._first_s, most_s=self._pulse.most_s)
        skipped = self._skipped
        dialling = _Dialling(lambda stage, number: self._connect(origin, within_s, stage, skipped=skipped + number - 1))
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("the connections were closed")
            self._under_way.add(dialling)
        try:
            made = dialling.made(self._pulse, within_s=within_s, unless=unless)
        except TimeoutError:
            self._failures, self._skipped = self._failures + 1, skipped + dialling.begun
            raise TimeoutError(f"{origin}: {dialling.stage} (waited {within_s:g} s)") from None
        finally:
            with self._lock:
                self._under_way.discard(dialling)
            dialling.end()
        self._failures, self._skipped = 0, skipped + dialling.won - 1
        return made

    def close(self) -> None:
        """Cancel the attempts in progress; later ones fail."""
        with self._lock:
            self._closed = True
            under_way = list(self._under_way)
        for dialling in under_way:
            dialling.end()

    def _connect(self, origin: str, within_s: float, stage: Callable[[str, Link | None], None], *, skipped: int) -> Connection:
        parts, to = urlsplit(origin), self._proxy_of(origin)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        first = (to.host, to.port) if to else (host, port)
        where = f"the proxy {first[0]}:{first[1]}" if to else origin  # a proxy's URL may hold a password
        stage(f"{where} did not accept a connection" + (" or did not open a tunnel" if to else ""), None)
        # http.client is used for the proxy's CONNECT request alone.
        plain = http.client.HTTPConnection(*first, timeout=within_s)
        plain._create_connection = functools.partial(_reached, skipped=skipped)  # type: ignore[attr-defined]  # what http.client connects by has no public name
        if to and parts.scheme == "https":
            plain.set_tunnel(host, port, to.headers)
        try:
            plain.connect()
        except TimeoutError:
            raise
        except OSError as error:
            raise CannotConnect(f"{where}: {error.strerror or error}") from None
        link = Link(plain.sock, self._pulse, name=origin)
        try:
            link.settimeout(within_s)
            stage("connected, but TLS was not agreed on; is this an https port?", link)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                # Bytes in the send buffer cannot be paused any more, so the kernel is given little more than the link takes.
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
            tls = TlsConnection(link, self._tls, server_hostname=host) if parts.scheme == "https" else None
            link.let_the_kernel_wait()
        except BaseException:
            link.close()
            raise
        return tls or link


def _reached(to: tuple[str, int], timeout_s: float, source: None = None, *, skipped: int) -> socket.socket:
    """Connect to the first of a host's addresses that takes a connection, as ``socket.create_connection``.

    An address may drop what arrives, and one attempt spends all its time there. So each begins with another one.
    """
    found = socket.getaddrinfo(*to, type=socket.SOCK_STREAM)
    error: OSError = OSError(f"{to[0]} has no address")
    for index in hedging.address_order([family for family, *_ in found], skipped=skipped):
        family, kind, protocol, _, address = found[index]
        connecting = None
        try:
            connecting = socket.socket(family, kind, protocol)
            connecting.settimeout(timeout_s)
            connecting.connect(address)
        except OSError as refused:
            error = refused
            if connecting is not None:
                connecting.close()
        else:
            return connecting
    raise error


class _Dialling:
    """One requested connection, with all concurrent attempts to make it. The first that succeeds wins."""

    def __init__(self, connect: Callable[[Callable[[str, Link | None], None], int], Connection]) -> None:
        """``connect`` takes what records its stage, and the number of the attempt, from 1."""
        self.stage = "no connection"
        """The step that the first attempt is waiting for, as text."""
        self.begun = 0
        """Number of attempts; ``won``: of the one that made the connection."""
        self.won = 0
        self._connect = connect
        self._changed = threading.Condition()
        self._made: Connection | None = None
        self._errors: list[BaseException] = []
        self._links: set[Link] = set()
        self._ended = False

    def made(self, pulse: Pulse, *, within_s: float, unless: Callable[[], bool]) -> Connection:
        """Start an attempt, hedge it when it is late, and return the first connection made.

        Raises:
            OSError: The first attempt's error, once all attempts have failed; or ``end`` was called.
            TimeoutError: None was made within ``within_s`` seconds.
            NotNeeded: ``unless`` returned True.
        """
        began_s = latest_s = time.monotonic()
        self._begin()
        with self._changed:
            while True:
                now_s = time.monotonic()
                if self._made is not None:
                    made, self._made = self._made, None
                    pulse.latencies.took(_KIND, now_s - latest_s)
                    return made
                if self._ended:
                    raise ConnectionAbortedError("the connections were closed")
                if len(self._errors) == self.begun:
                    raise self._errors[0]
                if now_s - began_s >= within_s:
                    pulse.quiet.fell_silent(since_s=began_s, now_s=now_s)
                    raise TimeoutError
                wait_s = hedging.next_try_s(
                    pulse.late_s(_KIND), tries=self.begun, quiet_before_s=pulse.quiet.before_s(latest_s), most_s=pulse.most_s
                )
                if now_s - latest_s >= wait_s and self.begun - len(self._errors) < hedging.AT_ONCE:
                    pulse.quiet.fell_silent(since_s=latest_s, now_s=now_s)
                    latest_s = now_s
                    self._begin()
                elif unless():
                    raise NotNeeded
                self._changed.wait(CHECK_NEED_S)

    def end(self) -> None:
        """Cancel all attempts, and close a connection that nobody took."""
        with self._changed:
            self._ended = True
            links, made, self._made = list(self._links), self._made, None
            self._changed.notify_all()
        for link in links:
            link.abandon()
        if made is not None:
            made.close()

    def _begin(self) -> None:
        self.begun += 1
        thread = threading.Thread(target=self._try, args=(self.begun,), name="connect", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached
            self._errors.append(OSError(f"no thread to connect in: {error}: {MORE_THREADS}"))

    def _try(self, number: int) -> None:
        mine: Link | None = None

        def stage(text: str, link: Link | None) -> None:
            nonlocal mine
            mine = link
            with self._changed:
                if number == 1:
                    self.stage = text
                if link is not None:
                    self._links.add(link)
                    if self._ended:
                        raise ConnectionAbortedError("the connection is no longer needed")

        try:
            made = self._connect(stage, number)
        except BaseException as error:
            with self._changed:
                self._links -= {mine} if mine else set()
                self._errors.append(error)
                self._changed.notify_all()
            return
        with self._changed:
            self._links -= {mine} if mine else set()
            if not self._ended and self._made is None:
                self._made, self.won = made, number
                self._changed.notify_all()
                return
        with suppress(OSError):
            made.close()
