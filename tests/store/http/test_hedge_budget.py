"""The budget of hedges, while connections that took a request stay silent for ever."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from sidecar.core.schedule import hedging
from sidecar.store.http.link import Pulse
from sidecar.store.http.wire import Request, Wire
from sidecar.store.s3.client import S3Options
from sidecar.store.s3.store import S3Store
from tests.store.http.test_exchange import Silent, answers, soon
from tests.store.http.test_wire import body_of, exchange, read_request, serving


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "UNKNOWN_S", 0.3)
    monkeypatch.setattr(hedging, "LEAST_S", 0.3)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire(tls=None, connect_timeout_s=5.0, stall_s=60.0)
    yield made
    made.close()


@pytest.mark.parametrize("size_bytes", [32 << 10, 2 << 20])
def test_a_body_whose_hedge_is_silent_too_is_sent_again(wire: Wire, size_bytes: int) -> None:
    """Others are answered meanwhile, as by a proxy that forwards bodies slowly: it waited ten minutes."""
    silent, over = [Silent(), Silent(), Silent()], threading.Event()

    def others_are_answered() -> None:
        while not over.wait(0.05):
            wire.pulse.quiet.heard_s = time.monotonic()

    others = threading.Thread(target=others_are_answered)
    others.start()
    try:
        with serving(*silent, answers, tls=None) as url, body_of(os.urandom(size_bytes)) as body, soon():
            assert exchange(wire, Request("PUT", url, {}, body)).content == b"ok"
            for each in silent:
                each.go_on()
    finally:
        over.set()
        others.join()


def test_a_small_request_whose_hedges_are_silent_is_sent_again(wire: Wire) -> None:
    """The store answers nothing meanwhile: both places of the budget are its own, and it waited a minute."""
    silent = [Silent() for _ in range(4)]
    with serving(*silent, answers, tls=None) as url, soon():
        assert exchange(wire, Request("GET", url, {})).content == b"ok"
        for each in silent:
            each.go_on()


def answers_with_object(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nETag: "444bcb3a3fcf8389296c49467f27e1d6"\r\n\r\nok')


def test_a_document_whose_hedges_are_silent_is_asked_for_again(credentials_dir: Path) -> None:
    """As the one before, on the plane of small requests."""
    silent = [Silent() for _ in range(4)]
    with serving(*silent, answers_with_object, tls=None) as url, soon():
        store = S3Store(
            S3Options(bucket="b", prefix="run", endpoint_url=url.removesuffix("/k"), credentials_dir=credentials_dir)
        )
        assert store.get("k") == b"ok"
        for each in silent:
            each.go_on()
        store.close()


def test_two_requests_whose_hedges_are_silent_are_sent_again(wire: Wire) -> None:
    """Each has one place of the budget, and neither got another: after a short cut, both waited a minute."""
    silent = [Silent() for _ in range(4)]
    with serving(*silent, answers, answers, tls=None) as url, soon(), ThreadPoolExecutor(2) as threads:
        for answer in threads.map(lambda _: exchange(wire, Request("GET", url, {})), range(2)):
            assert answer.content == b"ok"
        for each in silent:
            each.go_on()


def test_two_documents_whose_hedges_are_silent_are_asked_for_again(credentials_dir: Path) -> None:
    silent = [Silent() for _ in range(4)]
    with serving(*silent, *[answers_with_object] * 3, tls=None) as url, soon(), ThreadPoolExecutor(2) as threads:
        store = S3Store(
            S3Options(bucket="b", prefix="run", endpoint_url=url.removesuffix("/k"), credentials_dir=credentials_dir)
        )
        assert list(threads.map(store.get, ["k", "k"])) == [b"ok", b"ok"]
        for each in silent:
            each.go_on()
        store.close()


def test_a_hedge_in_the_place_of_another_needs_no_place_of_its_own() -> None:
    pulse, now_s = Pulse(most_s=60.0), time.monotonic()
    assert [pulse.begin_hedge(waiting_since_s=now_s - 1, now_s=now_s) for _ in range(3)] == [True, True, False]
    assert pulse.begin_hedge(waiting_since_s=now_s - 1, now_s=now_s, replaces=True)
    pulse.end_hedge()
    assert not pulse.begin_hedge(waiting_since_s=now_s - 1, now_s=now_s), "both places are taken"


def test_where_the_budget_is_spent_a_request_gives_its_own_hedge_up_for_the_next() -> None:
    pulse, now_s = Pulse(most_s=60.0), time.monotonic()

    def place(*is_hedge: bool, at_once: int = 3) -> object:
        tries = [SimpleNamespace(is_hedge=its, number=number) for number, its in enumerate(is_hedge)]
        its = pulse.place_of_hedge(tries, at_once=at_once, waiting_since_s=now_s - 1, now_s=now_s)
        if its is None or its.replaced is None:
            return its and "free"
        pulse.end_hedge()  # that of the one that is given up
        return its.replaced.number

    assert [place(False), place(False, True), place(False)] == ["free", "free", None], "two beside the first tries"
    assert place(False, True) == place(False, True, True) == place(False, True, at_once=2) == 1


def test_a_slow_deletion_of_parts_is_asked_for_few_times(credentials_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RGW deletes 10,000 parts for each try, abandoned or not: six tries of one abort slowed the store down for all others."""
    monkeypatch.setitem(hedging.LEAST_OF_KIND_S, "AbortMultipartUpload", 0.2)
    asked_s: list[float] = []

    def slow(connection: socket.socket) -> None:
        read_request(connection)
        asked_s.append(time.monotonic())
        time.sleep(max(0.0, asked_s[0] + 3.0 - time.monotonic()))
        connection.sendall(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")

    with serving(*[slow] * 8, tls=None) as url:
        store = S3Store(
            S3Options(bucket="b", prefix="run", endpoint_url=url.removesuffix("/k"), credentials_dir=credentials_dir)
        )
        store.abort_upload("k", "an-id")
        store.close()
        assert 2 <= len(asked_s) <= 3
        assert asked_s[-1] - asked_s[0] >= 0.8
