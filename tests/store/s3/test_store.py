"""What can go wrong between us and an S3 server, and what is said then."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import (
    AlreadyExists,
    NotFound,
    StoreUnavailable,
    UnreadableFile,
)
from sidecar.store.protocol import Verification
from sidecar.store.s3.control import Control
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.ports import free_port
from tests.servers import Proxy, ProxyAnswer, Request, s3_error
from tests.store.conftest import Source, _make_bucket, read_all
from tests.store.s3.conftest import Opener, always

MIB = 1 << 20


# Nobody answers.


def test_a_closed_port_is_reported_at_once_and_is_transient(opener: Opener) -> None:
    store = opener(f"http://127.0.0.1:{free_port()}")
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="Connect") as caught:
        store.probe()
    assert time.monotonic() - began_s < 5
    assert caught.value.transient


def test_a_server_that_never_answers_is_reported_after_the_timeout(opener: Opener, plain: Source) -> None:
    with servers.silent() as endpoint:
        store = opener(endpoint, connect_timeout_s=0.5, read_timeout_s=1.0)
        for call in (lambda: store.get("k"), lambda: plain.put(store, "k", b"x" * 8 * MIB)):
            began_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            assert time.monotonic() - began_s < 6


def test_a_name_that_does_not_resolve_is_unavailable(opener: Opener) -> None:
    with pytest.raises(StoreUnavailable, match=r"store\.invalid"):
        opener("http://store.invalid").probe()


def test_the_round_trip_is_that_of_files_not_of_documents(
    moto_endpoint: str, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_bucket(moto_endpoint)
    ask, slow_s = Control.get, 1.0

    async def slowly(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(slow_s)
        return await ask(*args, **kwargs)

    monkeypatch.setattr(Control, "get", slowly)
    round_trip_s = opener(moto_endpoint).probe().round_trip_s
    assert round_trip_s is not None
    assert round_trip_s < slow_s


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests"), (409, "ConditionalRequestConflict")],
)
def test_a_store_in_trouble_is_transient_and_asked_twice_at_most(opener: Opener, status: int, code: str) -> None:
    proxy = always(s3_error(status, code))
    with proxy.running() as endpoint, pytest.raises(StoreUnavailable, match=code):
        opener(endpoint).put("k", b"", only_if_absent=True)
    assert len(proxy.seen) <= 2


def test_a_single_5xx_of_a_small_request_goes_unnoticed(opener: Opener, moto: str) -> None:
    failures = [s3_error(503, "SlowDown")]
    with Proxy(moto, lambda request: failures.pop() if failures and request.method == "PUT" else None).running() as endpoint:
        store = opener(endpoint)
        store.put("k", b"weights" * 1000)
        assert store.get("k") == b"weights" * 1000


def test_a_load_balancer_that_answers_in_html_is_unavailable(opener: Opener) -> None:
    answer = 502, {"Content-Type": "text/html"}, b"<html><body>Bad Gateway</body></html>"
    with always(answer).running() as endpoint, pytest.raises(StoreUnavailable, match="502"):
        opener(endpoint).get("k")


# The protocol's small print.


def test_an_object_for_the_prefix_itself_is_not_listed(opener: Opener, moto: str) -> None:
    prefix = uuid.uuid4().hex
    opener(moto, prefix="").put(f"{prefix}/", b"")
    store = opener(moto, prefix=prefix)
    store.put("checkpoint-1/x", b"")
    assert [found.key for found in store.list("")] == ["checkpoint-1/x"]
    assert list(store.list_folders()) == ["checkpoint-1"]


def test_small_files_leave_with_their_headers(opener: Opener, moto: str, plain: Source) -> None:
    proxy = Proxy(moto)
    with proxy.running() as endpoint:
        plain.put(opener(endpoint), "k", b"x" * 4096)
    assert "Expect" not in proxy.seen[-1].headers


@pytest.mark.parametrize("server", ["moto", *servers.REAL_STORES])
def test_a_completion_whose_answer_was_lost_succeeds_again(
    request: pytest.FixtureRequest, opener: Opener, plain: Source, server: str
) -> None:
    endpoint = request.getfixturevalue(f"{server}_endpoint")
    _make_bucket(endpoint)
    store = opener(endpoint)
    store.probe()
    upload_id = store.begin_upload("k")
    part = plain.part(store, "k", upload_id, 1, b"weights")
    stored = store.complete_upload("k", upload_id, [part], crc64nvme=checksum(b"weights"))
    assert store.complete_upload("k", upload_id, [part], crc64nvme=checksum(b"weights")) == stored
    store.put("k", b"another")
    with pytest.raises(NotFound):
        store.complete_upload("k", upload_id, [part], crc64nvme=checksum(b"weights"))


def test_an_upload_that_another_try_is_still_joining_is_not_taken_for_lost(opener: Opener, moto: str, plain: Source) -> None:
    joined: list[threading.Thread] = []
    is_probed = threading.Event()

    def rule(request: Request) -> ProxyAnswer | None:
        if request.method != "POST" or "uploadId" not in request.query or joined or not is_probed.is_set():
            return None
        # The first try has arrived and takes its time; this is the answer to the one beside it.
        joined.append(threading.Timer(0.5, proxy._pass_on, [request]))
        joined[0].start()
        return s3_error(404, "NoSuchUpload")

    proxy = Proxy(moto, rule)
    with proxy.running() as endpoint:
        store = opener(endpoint)
        store.probe()
        is_probed.set()
        upload_id = store.begin_upload("late")
        part = plain.part(store, "late", upload_id, 1, b"weights")
        stored = store.complete_upload("late", upload_id, [part], crc64nvme=checksum(b"weights"))
        joined[0].join()
        assert stored == store.stat("late")


def test_encryption_is_asked_for_with_every_object(opener: Opener, moto: str, plain: Source) -> None:
    proxy = Proxy(moto)
    with proxy.running() as endpoint:
        store = opener(endpoint, sse="aws:kms", sse_kms_key_id="key-1")
        store.put("a", b"x")
        plain.put(store, "b", b"x")
        store.begin_upload("c")
    sent = [request.headers for request in proxy.seen if request.method != "GET"]
    assert all(headers["x-amz-server-side-encryption"] == "aws:kms" for headers in sent)
    assert all(headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1" for headers in sent)


def test_an_acl_is_asked_for_with_every_object(opener: Opener, moto: str, plain: Source) -> None:
    proxy = Proxy(moto)
    with proxy.running() as endpoint:
        store = opener(endpoint, acl="bucket-owner-full-control")
        etag = store.put("a", b"x").etag
        plain.put(store, "b", b"x")
        store.begin_upload("c")
        store.copy("a", "d", etag=etag)
    sent = [request.headers for request in proxy.seen if request.method != "GET"]
    assert [headers["x-amz-acl"] for headers in sent] == ["bucket-owner-full-control"] * 4


@pytest.mark.parametrize("client", ["wire", "boto3"])
def test_every_request_says_who_pays(opener: Opener, moto: str, plain: Source, client: str) -> None:
    proxy = Proxy(moto, servers.requester_pays)
    with proxy.running() as endpoint:
        store = opener(endpoint, request_payer="requester", client=client)
        store.probe()
        plain.put(store, "a", b"x")
        assert read_all(store, "a") == b"x"
        list(store.pending_uploads(""))
        upload = store.begin_upload("b")
        list(store.list_parts("b", upload))
        store.abort_upload("b", upload)
        store.copy("a", "c", etag=store.stat("a").etag)
        store.delete(["a", "odd/../b"])
    assert all(request.headers["x-amz-request-payer"] == "requester" for request in proxy.seen)


def test_deletions_carry_the_md5_that_older_stores_insist_on(opener: Opener, moto: str) -> None:
    proxy = Proxy(moto)
    with proxy.running() as endpoint:
        opener(endpoint).delete(["a"])
    assert proxy.seen[0].headers["Content-MD5"]


def test_a_body_is_read_once_in_large_blocks_and_neither_hashed_nor_chunked(opener: Opener, moto: str, tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counting(OpenGate):
        def pass_through(self, size_bytes: int) -> None:
            sizes.append(size_bytes)

    proxy = Proxy(moto)
    with proxy.running() as endpoint, Source(tmp_path, Verification.OFF).of(b"x" * 4 * MIB, gate=Counting()) as body:
        store = opener(endpoint)
        store.md5_with_bodies = False  # as a probe finds, but where Object Lock wants it
        store.put_file("k", body)
    assert sum(sizes) == 4 * MIB
    assert min(sizes) >= 256 << 10
    headers = proxy.seen[-1].headers
    assert headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
    assert "aws-chunked" not in headers.get("Content-Encoding", "")
    assert headers["Content-Length"] == str(4 * MIB)


def test_sending_waits_longer_than_connecting(opener: Opener, tmp_path: Path) -> None:
    """urllib3's way is the connect timeout for both: a slow link would break at its first block."""

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                left = 8 * MIB
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65_536)
                time.sleep(1.0)  # longer than the connect timeout
                left -= len(head.split(b"\r\n\r\n", 1)[1])
                while left:
                    left -= len(connection.recv(MIB))
                connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n')

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        store = opener(f"http://127.0.0.1:{server.getsockname()[1]}", connect_timeout_s=0.4, read_timeout_s=10.0)
        with Source(tmp_path, Verification.OFF).of(b"x" * 8 * MIB) as body:
            assert store.put_file("k", body).etag == "e"
        thread.join()


@pytest.mark.parametrize("size_bytes", [10, MIB])
@pytest.mark.parametrize("verification", [Verification.MD5, Verification.STORE_CRC])
def test_what_the_volume_does_wrong_is_not_taken_for_the_stores_fault(
    opener: Opener, moto: str, size_bytes: int, verification: Verification
) -> None:
    body = FileSlice(-1, 0, size_bytes, gate=OpenGate(), name="closed")
    store = opener(moto)
    store.verification = verification
    with pytest.raises(UnreadableFile, match="Bad file descriptor"):
        store.put_file("k", body)
    with ThreadPoolExecutor(16) as callers:  # no connection was lost on the way
        assert len(list(callers.map(lambda n: store.put(f"k{n}", b""), range(64)))) == 64


def test_a_closed_store_is_unavailable(opener: Opener, moto: str) -> None:
    store = opener(moto)
    store.put("k", b"")
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get("k")


def test_no_secret_is_logged(opener: Opener, moto: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = servers.write_credentials(tmp_path / "secret", secret_key="hunter2-hunter2")
    with caplog.at_level(logging.INFO):
        store = opener(moto, credentials_dir=secret)
        store.put("k", b"", only_if_absent=True)
        with pytest.raises(AlreadyExists):
            store.put("k", b"another", only_if_absent=True)
    assert "hunter2" not in caplog.text + repr(store.__dict__)
