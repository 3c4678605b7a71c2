"""New connections to a host with several addresses, some of which do not answer."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from sidecar.store.http.dial import Dialler
from sidecar.store.http.link import Pulse

HOST = "store.test"


@contextmanager
def blackhole(host: str, port: int) -> Iterator[None]:
    """Listen at an address that drops what arrives: its queue of connections is full."""
    with ExitStack() as opened:
        listening = opened.enter_context(socket.socket())
        listening.bind((host, port))
        listening.listen(0)
        for _ in range(4):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a server at the last of a host's addresses."""
    resolve = socket.getaddrinfo

    def resolved(host: str, port: int, *rest: int, **more: int) -> list[object]:
        hosts = [f"127.0.0.{last}" for last in (2, 3, 4, 5, 1)] if host == HOST else [host]
        return [found for each in hosts for found in resolve(each, port, *rest, **more)]

    with ExitStack() as opened:
        listening = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        for last in (2, 3, 4, 5):
            opened.enter_context(blackhole(f"127.0.0.{last}", port))
        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        yield port


def test_an_address_that_does_not_answer_is_followed_by_the_next_ones(port: int) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialler = Dialler(tls=tls, connect_timeout_s=2.0, pulse=Pulse(most_s=4.0), proxy_of=lambda _: None)
    failures = 0
    while True:
        try:
            dialler.dial(f"http://{HOST}:{port}").close()
            break
        except TimeoutError:
            failures += 1
            assert failures < 4, "each dial tries the same addresses"
    dialler.dial(f"http://{HOST}:{port}").close()  # begins with the address that answered
    dialler.close()
