"""Requests beside a late one, connections in the place of silent ones: against servers made for one misbehaviour each."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.store.http.link import Link, Pulse
from sidecar.store.http.tries import Try
from sidecar.store.http.wire import Request, Wire
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.store.http.test_wire import OK, body_of, exchange, read_request, serving

MIB = 1 << 20
BOUND_S = 30.0
"""Half of the longest wait; the machine may be busy."""


@pytest.fixture
def wire(secure: tuple[ssl.SSLContext, Path]) -> Iterator[Wire]:
    made = Wire(tls=ssl.create_default_context(cafile=secure[1]), connect_timeout_s=5.0, stall_s=60.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    return servers.self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest, secure: tuple[ssl.SSLContext, Path]) -> ssl.SSLContext | None:
    return secure[0] if request.param == "https" else None


@contextmanager
def soon() -> Iterator[None]:
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < BOUND_S


def answers(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(OK)


class Silent:
    """A server's side that takes a request, and says nothing until it is told to."""

    def __init__(self, then: bytes = b"") -> None:
        self.body = b""
        self.ended = threading.Event()
        self._go_on = threading.Event()
        self._then = then

    def __call__(self, connection: socket.socket) -> None:
        self.body = read_request(connection)
        self._go_on.wait(BOUND_S)
        if self._then:
            connection.sendall(self._then)
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            self.ended.set()

    def go_on(self) -> None:
        self._go_on.set()


def test_the_other_request_is_ended_as_soon_as_one_was_answered(wire: Wire) -> None:
    silent = Silent()
    silent.go_on()
    with serving(silent, answers, tls=None) as url:
        with soon():
            assert exchange(wire, Request("GET", url, {})).content == b"ok"
        assert silent.ended.wait(BOUND_S), "with a reset, so that nothing of it can arrive any more"


@pytest.mark.slow
def test_a_slow_answer_counts_though_another_request_is_under_way(wire: Wire, tls: ssl.SSLContext | None) -> None:
    first, second = Silent(then=OK), Silent()
    second.go_on()

    def slowly(connection: socket.socket) -> None:
        threading.Timer(0.5, first.go_on).start()  # when the second request was made
        second(connection)

    with serving(first, slowly, tls=tls) as url, soon():
        assert exchange(wire, Request("GET", url, {})).content == b"ok"


def test_a_body_is_sent_again_beside_a_late_answer_and_has_its_checksum_once(wire: Wire, tls: ssl.SSLContext | None) -> None:
    content, arrived, silent = os.urandom(3 * MIB + 7), [], Silent()
    silent.go_on()

    def takes(connection: socket.socket) -> None:
        arrived.append(read_request(connection))
        connection.sendall(OK)

    with serving(silent, takes, tls=tls) as url, body_of(content) as body, soon():
        assert exchange(wire, Request("PUT", url, {}, body)).content == b"ok"
        assert body.crc64nvme == body.crc64nvme_ahead()
    assert arrived == [silent.body] == [content]


@pytest.mark.slow
def test_an_answer_ends_the_body_that_is_sent_again(wire: Wire) -> None:
    content, first = os.urandom(32 * MIB), Silent(then=OK)

    def stuffed(connection: socket.socket) -> None:
        connection.recv(1000)
        first.go_on()
        time.sleep(2)

    with serving(first, stuffed, tls=None) as url, body_of(content) as body, soon():
        assert exchange(wire, Request("PUT", url, {}, body)).content == b"ok"
        assert body.crc64nvme == body.crc64nvme_ahead()


@pytest.mark.parametrize("status", [b"500 Internal Server Error", b"409 Conflict", b"412 Precondition Failed"])
@pytest.mark.slow
def test_an_error_of_one_request_does_not_count_while_the_other_may_succeed(wire: Wire, status: bytes) -> None:
    first = Silent(then=OK)

    def fails(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n")
        first.go_on()

    with serving(first, fails, tls=None) as url, soon():
        assert exchange(wire, Request("PUT", url, {}, b"x")).status == 200


def test_an_error_counts_when_the_other_request_stays_silent(wire: Wire) -> None:
    def fails(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")

    silent = Silent()
    silent.go_on()
    with serving(silent, fails, tls=None) as url, soon():
        assert exchange(wire, Request("GET", url, {})).status == 500


def takes_nothing(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    connection.recv(1000)
    time.sleep(6)


def takes_hardly_anything(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 10)
    with contextlib.suppress(OSError):
        for _ in range(600):
            connection.recv(100)
            time.sleep(0.1)


@pytest.mark.parametrize("first", [takes_nothing, takes_hardly_anything])
@pytest.mark.slow
def test_a_body_that_does_not_leave_is_sent_again_from_its_beginning(
    first: Callable[[socket.socket], None], wire: Wire, tls: ssl.SSLContext | None
) -> None:
    content, arrived = os.urandom(6 * MIB), []

    def takes(connection: socket.socket) -> None:
        arrived.append(read_request(connection))
        connection.sendall(OK)

    with serving(first, takes, tls=tls) as url, body_of(content) as body, soon():
        assert exchange(wire, Request("PUT", url, {}, body)).content == b"ok"
    assert arrived == [content]


@pytest.mark.slow
def test_an_answer_whose_rest_does_not_come_is_asked_for_again(wire: Wire, tls: ssl.SSLContext | None) -> None:
    def stops(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        time.sleep(6)

    with serving(stops, answers, tls=tls) as url, soon():
        assert exchange(wire, Request("GET", url, {})).content == b"ok"


def trickling(connection: socket.socket, content: bytes) -> None:
    read_request(connection)
    try:
        for n in range(len(content)):
            connection.sendall(content[n : n + 1])
            time.sleep(0.1)
    except OSError:
        return


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_head_that_trickles_is_late(wire: Wire, method: str, tls: ssl.SSLContext | None) -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Long: %s\r\nContent-Length: 4\r\n\r\nlate" % (b"x" * 400)
    with serving(lambda connection: trickling(connection, head), answers, tls=tls) as url, soon():
        assert exchange(wire, Request(method, url, {}, None if method == "GET" else b"")).content == b"ok"


def test_interim_answers_are_no_answer(wire: Wire) -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n" * 20
    with serving(lambda connection: trickling(connection, interim), answers, tls=None) as url, soon():
        assert exchange(wire, Request("GET", url, {})).content == b"ok"


def test_a_body_that_trickles_is_asked_for_again(wire: Wire, tls: ssl.SSLContext | None) -> None:
    def trickles(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(400):
                connection.sendall(b"x")
                time.sleep(0.1)

    with serving(trickles, answers, tls=tls) as url, soon():
        assert exchange(wire, Request("GET", url, {})).content == b"ok"


@pytest.mark.slow
def test_a_store_that_works_for_long_and_says_so_with_spaces_is_not_asked_again(wire: Wire) -> None:
    def works(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 44\r\n\r\n")
        for _ in range(40):
            connection.sendall(b" ")
            time.sleep(0.1)
        connection.sendall(b"done")

    with serving(works, answers, tls=None) as url:
        assert exchange(wire, Request("POST", url, {}, b"")).content.strip() == b"done"


def test_a_slow_link_that_moves_is_told_from_one_that_trickles() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        attempt = Try(Link(here, Pulse(most_s=60.0), name="store"), None, is_new=True)
        for _ in range(20):
            attempt.connection.sendall(bytes(1000))
        assert not attempt.is_leaving(100.0)
        there.recv(1000)
        assert attempt.is_leaving(100.25), "a share of a slow link, though less than 4 KiB yet"
        assert not attempt.is_leaving(101.0)
        there.recv(1000)
        assert not attempt.is_leaving(105.0), "as good as silent"
        attempt.connection.close()


@pytest.mark.slow
@pytest.mark.slow
def test_a_connection_that_is_not_made_in_time_is_not_waited_for(wire: Wire) -> None:
    """It is accepted, and TLS is not agreed on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []

        def serve() -> None:
            accepted.extend(listening.accept()[0] for _ in range(2))
            accepted[1].close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(OSError, match="TLS"):
            exchange(wire, Request("GET", f"https://127.0.0.1:{listening.getsockname()[1]}/k", {}))
        assert time.monotonic() - began_s < BOUND_S
        thread.join(BOUND_S)
        assert len(accepted) == 2, "another was tried beside the first"
        for connection in accepted:
            connection.close()


def test_a_gate_that_is_held_is_no_silence(wire: Wire) -> None:
    held = threading.Event()

    class Held(OpenGate):
        def pass_through(self, size_bytes: int) -> None:
            if not held.is_set():
                held.set()
                time.sleep(4)

    content, arrived = os.urandom(4 * MIB), []

    def takes(connection: socket.socket) -> None:
        arrived.append(read_request(connection))
        connection.sendall(OK)

    fd = os.memfd_create("body")
    try:
        os.write(fd, content)
        with serving(takes, tls=None) as url:
            body = FileSlice(fd, 0, len(content), gate=Held(), name="body")
            assert exchange(wire, Request("PUT", url, {}, body)).status == 200
    finally:
        os.close(fd)
    assert arrived == [content]
