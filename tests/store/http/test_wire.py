"""The wire against servers that are made for one misbehaviour each."""

from __future__ import annotations

import functools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path

import pytest

from sidecar.store.http.answer import OpenAnswer
from sidecar.store.http.exchange import sent
from sidecar.store.http.link import Silent
from sidecar.store.http.wire import Request, WholeAnswer, Wire, whole
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers

MIB = 1 << 20
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


Conversation = Callable[[socket.socket], None]
Server = Callable[..., AbstractContextManager[str]]


def exchange(wire: Wire, request: Request) -> WholeAnswer:
    """Send a request and return its whole answer; after an answer that stopped midway, once more."""
    while True:
        try:
            with sent(wire, request) as answered:
                return whole(answered())
        except Silent:
            request = replace(request, silences=request.silences + 1)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, Path]:
    return servers.self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["http", "https", "https 1.2"])
def server(request: pytest.FixtureRequest, secure: tuple[ssl.SSLContext, Path]) -> Server:
    tls = secure[0]
    tls.maximum_version = ssl.TLSVersion.TLSv1_2 if request.param == "https 1.2" else ssl.TLSVersion.TLSv1_3
    return functools.partial(serving, tls=None if request.param == "http" else tls)


@contextmanager
def serving(*conversations: Conversation, tls: ssl.SSLContext | None) -> Iterator[str]:
    """Have each connection, in order of arrival, served by one of these; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(accepted: socket.socket, conversation: Conversation) -> None:
            with accepted, suppress(OSError):
                connection = tls.wrap_socket(accepted, server_side=True) if tls else accepted
                with connection:
                    conversation(connection)

        def listen() -> None:
            with suppress(OSError):  # closed, where fewer connections came than conversations were prepared
                for conversation in conversations:
                    threads.append(threading.Thread(target=serve, args=(listening.accept()[0], conversation), daemon=True))
                    threads[-1].start()

        threads = [threading.Thread(target=listen, daemon=True)]
        threads[0].start()
        yield f"{'https' if tls else 'http'}://127.0.0.1:{listening.getsockname()[1]}/k"
        for thread in threads:
            thread.join(5)


def read_request(connection: socket.socket) -> bytes:
    """Read a whole request and return its body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    left = (int(lengths[0]) if lengths else 0) - len(body)
    while left > 0:
        block = connection.recv(min(left, MIB))
        body, left = body + block, left - len(block)
    return body


@pytest.fixture
def wire(secure: tuple[ssl.SSLContext, Path]) -> Iterator[Wire]:
    made = Wire(tls=ssl.create_default_context(cafile=secure[1]), connect_timeout_s=2.0, stall_s=2.0)
    yield made
    made.close()


@contextmanager
def fetched(wire: Wire, url: str) -> Iterator[OpenAnswer]:
    with sent(wire, Request("GET", url, {})) as answered:
        yield answered()


@contextmanager
def body_of(content: bytes) -> Iterator[FileSlice]:
    fd = os.memfd_create("body")
    try:
        os.write(fd, content)
        yield FileSlice(fd, 0, len(content), gate=OpenGate(), name="body")
    finally:
        os.close(fd)


@pytest.mark.parametrize("size_bytes", [0, 1, 32 << 10, (32 << 10) + 1, 3 * MIB + 5])
def test_a_body_arrives_as_it_is_with_its_checksum(wire: Wire, server: Server, size_bytes: int) -> None:
    content, arrived = os.urandom(size_bytes), []

    def take(connection: socket.socket) -> None:
        arrived.append(read_request(connection))
        connection.sendall(OK)

    with server(take) as url, body_of(content) as body:
        assert exchange(wire, Request("PUT", url, {}, body)).content == b"ok"
        assert body.crc64nvme == body.crc64nvme_ahead()
    assert arrived == [content]


def test_a_kept_connection_that_the_server_has_closed_is_replaced_unseen(wire: Wire, server: Server) -> None:
    def once(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(OK)

    with server(once, once) as url:
        for _ in range(2):
            with body_of(b"x" * MIB) as body:
                assert exchange(wire, Request("PUT", url, {}, body)).status == 200
            time.sleep(0.1)


def test_a_connection_that_dies_with_the_second_request_is_replaced_and_the_body_sent_again(wire: Wire, server: Server) -> None:
    arrived = []

    def dies(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(OK)
        connection.recv(1000)  # takes some of the next one, and goes

    def lives(connection: socket.socket) -> None:
        arrived.append(read_request(connection))
        connection.sendall(OK)

    with server(dies, lives) as url:
        for content in (b"first", b"second" * MIB):
            with body_of(content) as body:
                assert exchange(wire, Request("PUT", url, {}, body)).status == 200
    assert arrived == [b"second" * MIB]


def test_a_refusal_that_comes_before_all_was_sent_is_read(wire: Wire, server: Server) -> None:
    def refuses(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy")
        time.sleep(0.5)

    with server(refuses) as url, body_of(b"x" * 64 * MIB) as body:
        answer = exchange(wire, Request("PUT", url, {}, body))
        assert (answer.status, answer.content) == (503, b"busy")
        assert body.tell() < 64 * MIB


@pytest.mark.parametrize(
    "interim", [b"100 Continue\r\n\r\n", b"102 Processing\r\nA: b\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"]
)
def test_a_body_is_sent_to_its_end_to_a_server_that_sends_interim_answers_unasked(
    wire: Wire, server: Server, interim: bytes
) -> None:
    bodies = list[bytes]()

    def interrupting(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 " + interim)
        bodies.append(read_request(connection))
        connection.sendall(OK)

    with server(interrupting) as url, body_of(bytes(8 * MIB)) as body:
        assert exchange(wire, Request("PUT", url, {}, body)).status == 200
    assert len(bodies[0]) == 8 * MIB


@pytest.mark.slow
def test_a_server_that_stops_taking_is_given_up_after_the_stall(wire: Wire, server: Server) -> None:
    with server(lambda connection: time.sleep(8)) as url, body_of(b"x" * 64 * MIB) as body:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            exchange(wire, Request("PUT", url, {}, body))
        assert time.monotonic() - began_s > 1.5


def test_closing_ends_an_exchange_at_once(wire: Wire, server: Server) -> None:
    with server(lambda connection: time.sleep(4)) as url, body_of(b"x" * 64 * MIB) as body:
        threading.Timer(0.3, wire.close).start()
        with pytest.raises(OSError) as ended:
            exchange(wire, Request("PUT", url, {}, body))
        assert not isinstance(ended.value, TimeoutError), "the stall ended it"
        with pytest.raises(OSError):
            exchange(wire, Request("GET", url, {}))


def test_an_answer_that_is_not_read_to_its_end_costs_its_connection_and_nothing_else(wire: Wire, server: Server) -> None:
    def long(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000)
        connection.recv(1000)

    def short(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(OK)

    with server(long, short) as url:
        with fetched(wire, url) as answer:
            assert answer.read(10) == b"x" * 10
        assert exchange(wire, Request("GET", url, {})).content == b"ok"


def test_several_requests_are_under_way_on_connections_of_their_own(wire: Wire, server: Server) -> None:
    second_came = threading.Event()

    def first(connection: socket.socket) -> None:
        body = read_request(connection)
        assert second_came.wait(5)
        connection.sendall(OK[:-2] + body[:2])

    def second(connection: socket.socket) -> None:
        body = read_request(connection)
        connection.sendall(OK[:-2] + body[:2])
        second_came.set()

    with (
        server(first, second) as url,
        body_of(b"1st") as one,
        body_of(b"2nd") as other,
        sent(wire, Request("PUT", url, {}, one)) as one_answered,
        sent(wire, Request("PUT", url, {}, other)) as other_answered,
    ):
        assert whole(one_answered()).content == b"1s"
        assert whole(other_answered()).content == b"2n"


def test_a_connection_whose_answer_nobody_waited_for_is_not_used_again(wire: Wire, server: Server) -> None:
    def answers(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(OK)
        assert connection.recv(1000) == b""

    with server(answers, answers) as url:
        with sent(wire, Request("GET", url, {})):
            pass
        assert exchange(wire, Request("GET", url, {})).content == b"ok"
        wire.close()


def test_a_kept_connection_that_ends_instead_of_an_answer_is_replaced_and_the_body_is_sent_again(
    wire: Wire, server: Server
) -> None:
    came = []

    def ends(connection: socket.socket) -> None:
        came.append(read_request(connection))
        connection.sendall(OK)
        came.append(read_request(connection))

    def answers(connection: socket.socket) -> None:
        came.append(read_request(connection))
        connection.sendall(OK)

    with server(ends, answers) as url, body_of(b"body") as body:
        assert exchange(wire, Request("PUT", url, {}, body)).content == b"ok"
        with sent(wire, Request("PUT", url, {}, body)) as answered:
            assert whole(answered()).content == b"ok"
    assert came == [b"body"] * 3


def test_a_body_comes_as_it_was_sent_in_records_of_any_size(wire: Wire, server: Server) -> None:
    content = os.urandom(3 * MIB + 5)
    sizes = [1, 16 << 10, 5, 100_000, len(content)]

    def sends(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content))
        done = 0
        for size in sizes:
            connection.sendall(content[done : done + size])
            done += size

    came, buffer = bytearray(), memoryview(bytearray(MIB + 1))
    with server(sends) as url, fetched(wire, url) as answer:
        while count := answer.readinto(buffer):
            came += buffer[:count]
    assert came == content


def test_a_body_that_ends_early_is_not_taken_for_whole(wire: Wire, server: Server) -> None:
    def dies(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 70_000)

    with server(dies) as url, pytest.raises(HTTPException):
        exchange(wire, Request("GET", url, {}))


def test_a_second_answer_that_nobody_asked_for_is_not_taken_for_the_next_one(wire: Wire, server: Server) -> None:
    def says_too_much(connection: socket.socket) -> None:
        read_request(connection)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n"
        connection.sendall(head + b"x" * 20_000 + b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 5\r\n\r\nstray")
        connection.recv(1000)

    def answers(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(OK)

    with server(says_too_much, answers) as url:
        with fetched(wire, url) as answer:
            buffer = memoryview(bytearray(20_000))
            done = 0
            while done < len(buffer):
                done += answer.readinto(buffer[done:])
        assert exchange(wire, Request("GET", url, {})).content == b"ok"


def test_a_body_that_does_not_come_is_given_up_after_the_stall(wire: Wire, server: Server) -> None:
    def stops(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
        time.sleep(4)

    buffer = memoryview(bytearray(1000))
    with server(stops) as url, fetched(wire, url) as answer, pytest.raises(TimeoutError, match="does not come"):
        list(iter(lambda: answer.readinto(buffer), 0))


def test_it_is_whoever_waits_for_an_answer_that_is_told_that_it_does_not_come(wire: Wire, server: Server) -> None:
    with (
        server(lambda connection: time.sleep(4)) as url,
        sent(wire, Request("GET", url, {})) as answered,
        pytest.raises(TimeoutError),
    ):
        answered()


def test_a_server_that_does_not_answer_is_given_up_after_the_stall(wire: Wire, server: Server) -> None:
    with server(lambda connection: time.sleep(4)) as url:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            exchange(wire, Request("GET", url, {}))
        assert time.monotonic() - began_s > 1.5


# TLS alone.


def test_a_server_that_accepts_and_says_nothing_is_given_up_as_one_that_does_not_accept(wire: Wire) -> None:
    with serving(lambda connection: time.sleep(4), tls=None) as url:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"https://127.0.0.1:\d+.*TLS"):
            exchange(wire, Request("GET", url.replace("http:", "https:"), {}))
        assert time.monotonic() - began_s > 1.5


def test_a_certificate_that_is_not_trusted_is_named_and_the_server_told(secure: tuple[ssl.SSLContext, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        told: list[str] = []

        def serve() -> None:
            accepted, _ = listening.accept()
            with accepted:
                try:
                    secure[0].wrap_socket(accepted, server_side=True).recv(1)
                except ssl.SSLError as error:
                    told.append(str(error.reason))

        thread = threading.Thread(target=serve)
        thread.start()
        suspicious = Wire(tls=ssl.create_default_context(), connect_timeout_s=2.0, stall_s=2.0)
        with pytest.raises(ssl.SSLCertVerificationError):
            exchange(suspicious, Request("GET", f"https://127.0.0.1:{listening.getsockname()[1]}/k", {}))
        thread.join(5)
    assert told == ["TLSV1_ALERT_UNKNOWN_CA"]
