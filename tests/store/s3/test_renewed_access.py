"""Clients and connections of credentials that are not in use any more."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from sidecar.errors import StoreError
from sidecar.store.slice import FileSlice, OpenGate
from tests.servers import s3_error, silent
from tests.store.s3.conftest import Opener, always

FEW = 3


def _clients() -> int:
    gc.collect()
    return sum(type(found).__name__ == "S3" for found in gc.get_objects())


def test_refusals_that_go_on_for_days_leave_no_clients_behind(opener: Opener) -> None:
    with always(s3_error(403, "AccessDenied")).running() as endpoint:
        store, before = opener(endpoint), _clients()
        for _ in range(10 * FEW):
            with pytest.raises(StoreError, match="denied"):
                store.get("k")
        until_s = time.monotonic() + 5
        while (left := _clients() - before) > FEW and time.monotonic() < until_s:
            time.sleep(0.1)
        assert left <= FEW
        store.close()


def test_a_store_that_is_closed_ends_requests_that_began_with_earlier_credentials(opener: Opener) -> None:
    ended = threading.Event()
    fd = os.memfd_create("body")
    os.write(fd, b"x" * 1000)

    def put() -> None:
        with pytest.raises(StoreError):
            store.put_file("k", FileSlice(fd, 0, 1000, gate=OpenGate()))
        ended.set()

    with silent() as endpoint:
        store = opener(endpoint)
        threading.Thread(target=put, daemon=True).start()
        time.sleep(0.5)
        store._clients.forget()
        store._clients.current()
        store.close()
        assert ended.wait(3)
    os.close(fd)
