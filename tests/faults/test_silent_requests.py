"""Each sort of request, on a connection that goes silent at each point of it, costs moments and has its whole effect."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.errors import StoreError, StoreUnavailable
from sidecar.store.s3.store import S3Options, S3Store
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.faults.bucket import MIB, NAME, Bucket, random_bytes
from tests.faults.plan import Fault, Kind, Rule, Rules
from tests.faults.proxy import FaultProxy
from tests.process.sidecar_process import until
from tests.store.http.test_wire import read_request, serving

BOUND_S = 40.0
"""Less than a silent connection costs that is waited for; the machine may be busy."""
SMALL = b"small" * 100
ROLE_CREDENTIALS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>id</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>
<SessionToken>token</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


@functools.cache
def large() -> bytes:
    return random_bytes(6 * MIB, 5)


@contextmanager
def store_at(endpoint: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
    store = S3Store(S3Options(NAME, prefix, endpoint_url=endpoint, region=servers.REGION))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def slice_of(content: bytes) -> Iterator[FileSlice]:
    fd = os.memfd_create("body")
    try:
        os.write(fd, content)
        yield FileSlice(fd, 0, len(content), gate=OpenGate(), name="body", with_md5=True)
    finally:
        os.close(fd)


def read_whole(store: S3Store, key: str, length: int) -> bytes:
    content, done = memoryview(bytearray(length)), 0
    with store.read(key, length=length) as body:
        while done < length and (count := body.readinto(content[done:])):
            done += count
    return bytes(content[:done])


class Requests:
    """One method for each sort of request: it prepares what it needs, has the request harmed, makes it, and compares."""

    def __init__(self, store: S3Store) -> None:
        self.store = store

    def _put(self, content: bytes = SMALL) -> str:
        key = f"k/{uuid.uuid4().hex}"
        self.store.put(key, content)
        return key

    def get_object(self, harmed: Callable[[str], None]) -> None:
        harmed(key := self._put())
        assert self.store.get(key) == SMALL

    def get_object_large(self, harmed: Callable[[str], None]) -> None:
        harmed(key := self._put(large()))
        assert read_whole(self.store, key, len(large())) == large()

    def put_object(self, harmed: Callable[[str], None]) -> None:
        harmed(key := f"k/{uuid.uuid4().hex}")
        self.store.put(key, SMALL)
        assert self.store.get(key) == SMALL

    def put_object_once(self, harmed: Callable[[str], None]) -> None:
        harmed(key := f"k/{uuid.uuid4().hex}")
        self.store.put(key, SMALL, only_if_absent=True)
        assert self.store.get(key) == SMALL

    def put_object_large(self, harmed: Callable[[str], None]) -> None:
        harmed(key := f"k/{uuid.uuid4().hex}")
        with slice_of(large()) as body:
            stored = self.store.put_file(key, body)
            assert body.crc64nvme == body.crc64nvme_ahead()
        assert self.store.stat(key) == stored
        assert read_whole(self.store, key, len(large())) == large()

    def delete_objects(self, harmed: Callable[[str], None]) -> None:
        key = self._put()
        harmed("")
        self.store.delete([key])
        assert list(self.store.list(key)) == []

    def list_objects_v2(self, harmed: Callable[[str], None]) -> None:
        key = self._put()
        harmed("")
        assert [found.key for found in self.store.list(key)] == [key]

    def create_multipart_upload(self, harmed: Callable[[str], None]) -> None:
        harmed(key := f"k/{uuid.uuid4().hex}")
        upload_id = self.store.begin_upload(key)
        assert upload_id in {pending.upload_id for pending in self.store.pending_uploads(key)}
        self.store.abort_upload(key, upload_id)

    def upload_part(self, harmed: Callable[[str], None]) -> None:
        self._join(harmed)

    def complete_multipart_upload(self, harmed: Callable[[str], None]) -> None:
        self._join(harmed)

    def list_parts(self, harmed: Callable[[str], None]) -> None:
        upload_id = self.store.begin_upload(key := f"k/{uuid.uuid4().hex}")
        harmed(key)
        assert list(self.store.list_parts(key, upload_id)) == []

    def list_multipart_uploads(self, harmed: Callable[[str], None]) -> None:
        upload_id = self.store.begin_upload(key := f"k/{uuid.uuid4().hex}")
        harmed("")
        assert [pending.upload_id for pending in self.store.pending_uploads(key)] == [upload_id]

    def abort_multipart_upload(self, harmed: Callable[[str], None]) -> None:
        upload_id = self.store.begin_upload(key := f"k/{uuid.uuid4().hex}")
        harmed(key)
        self.store.abort_upload(key, upload_id)
        assert list(self.store.pending_uploads(key)) == []

    def _join(self, harmed: Callable[[str], None]) -> None:
        harmed(key := f"k/{uuid.uuid4().hex}")
        upload_id = self.store.begin_upload(key)
        with slice_of(large()) as body:
            part = self.store.upload_part(key, upload_id, 1, body)
            assert body.crc64nvme == body.crc64nvme_ahead()
            stored = self.store.complete_upload(key, upload_id, [part], crc64nvme=body.crc64nvme)
        assert self.store.stat(key) == stored
        assert read_whole(self.store, key, len(large())) == large()


SORTS = [name for name in vars(Requests) if not name.startswith("_")]


def operation_of(sort: str) -> str:
    words = sort.removesuffix("_large").removesuffix("_once").split("_")
    return "".join(word.capitalize() for word in words)


@pytest.mark.parametrize("kind", [Kind.SILENT_REQUEST, Kind.SILENT_UPLOAD, Kind.SILENT_ANSWER, Kind.SILENT_DOWNLOAD])
def test_a_silent_request_of_any_sort_is_made_again_within_moments(
    kind: Kind, plain_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, rules = FaultProxy(plain_bucket.endpoint), list[Rule]()
    with proxy.running() as endpoint, store_at(endpoint, plain_bucket.prefix, monkeypatch) as store:
        store.probe()
        proxy.plan = Rules(rules)
        requests = Requests(store)

        def took_s(sort: str) -> float:
            began_s = 0.0

            def harmed(key: str) -> None:
                nonlocal began_s
                rules.append(Rule(Fault(kind), operation=operation_of(sort), key=key))
                began_s = time.monotonic()

            getattr(requests, sort)(harmed)
            return time.monotonic() - began_s

        with ThreadPoolExecutor(len(SORTS)) as threads:
            took = dict(zip(SORTS, threads.map(took_s, SORTS), strict=True))
        unused = [rule.operation for rule in proxy.plan.unused()]
    assert unused == []
    assert {sort: seconds for sort, seconds in took.items() if seconds > BOUND_S} == {}


@pytest.mark.parametrize("kind", [Kind.SILENT_CONNECTION, Kind.SILENT_REQUEST, Kind.SILENT_ANSWER])
def test_each_connection_of_a_probe_may_go_silent(kind: Kind, moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    proxy.silences = {1: kind, 3: kind, 5: kind}  # the first, and what is made in the place of others
    with proxy.running() as endpoint, store_at(endpoint, moto_bucket.prefix, monkeypatch) as store:
        began_s = time.monotonic()
        store.probe()
        assert time.monotonic() - began_s < BOUND_S
        assert proxy.silenced


def test_kept_connections_that_went_silent_together_are_all_given_up_after_the_first(
    moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    proxy.silences = dict.fromkeys(range(1, 9), Kind.SILENT_WHEN_KEPT)
    with proxy.running() as endpoint, store_at(endpoint, moto_bucket.prefix, monkeypatch) as store:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda n: store.put(f"k/{n}", SMALL), range(8)))
        began_s = time.monotonic()
        for n in range(8):
            assert store.get(f"k/{n}") == SMALL
        assert time.monotonic() - began_s < BOUND_S


def test_a_copy_that_is_not_answered_is_given_up_and_not_made_twice(
    moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    proxy.plan = Rules([Rule(Fault(Kind.SILENT_REQUEST), key="copy$", operation="PutObject")])
    with proxy.running() as endpoint, store_at(endpoint, moto_bucket.prefix, monkeypatch) as store:
        stored, began_s = store.put("original", SMALL), time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.copy("original", "copy", etag=stored.etag)
        assert time.monotonic() - began_s < BOUND_S
        assert len(proxy.silenced) == 1
        assert [found.key for found in store.list("copy")] == []


def test_of_two_uploads_that_one_request_began_one_is_aborted(moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FaultProxy(moto_bucket.endpoint)
    proxy.plan = Rules([Rule(Fault(Kind.LATENCY, seconds=4), operation="CreateMultipartUpload")])
    with proxy.running() as endpoint, store_at(endpoint, moto_bucket.prefix, monkeypatch) as store:
        upload_id = store.begin_upload("k")
        until(lambda: [exchange.operation for exchange in proxy.log].count("AbortMultipartUpload") == 1, timeout_s=BOUND_S)
        until(lambda: [found.upload_id for found in store.pending_uploads("k")] == [upload_id], timeout_s=BOUND_S)
    assert [exchange.operation for exchange in proxy.log].count("CreateMultipartUpload") == 2


@pytest.mark.slow
def test_a_silent_connection_to_the_service_of_credentials_costs_moments(
    moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = threading.Event()

    def silent(_: socket.socket) -> None:
        ended.wait(BOUND_S)

    def issues(connection: socket.socket) -> None:
        read_request(connection)
        content = ROLE_CREDENTIALS.encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))

    (tmp_path / "token").write_text("token")
    with serving(silent, issues, tls=None) as url:
        settings = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}
        for name, value in {**settings, "AWS_ENDPOINT_URL_STS": url.removesuffix("/k")}.items():
            monkeypatch.setenv(name, value)
        store = S3Store(S3Options(NAME, moto_bucket.prefix, endpoint_url=moto_bucket.endpoint, region=servers.REGION))
        began_s = time.monotonic()
        assert list(store.list("nothing")) == []
        assert time.monotonic() - began_s < BOUND_S
        ended.set()
        store.close()


@pytest.mark.slow
def test_a_slow_link_that_moves_on_is_not_cut(moto_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, content = FaultProxy(moto_bucket.endpoint), random_bytes(3 * MIB, 9)
    with proxy.running() as endpoint, store_at(endpoint, moto_bucket.prefix, monkeypatch) as store:
        proxy.bytes_per_s = 500e3
        with slice_of(content) as body:
            store.put_file("k", body)
        first = next(exchange for exchange in proxy.log if exchange.operation == "PutObject")
        assert read_whole(store, "k", len(content)) == content
        read = [exchange for exchange in proxy.log if exchange.operation == "GetObject"]
    assert first.status == 200, "another may have begun beside it"
    assert len(read) == 1


@pytest.mark.slow
def test_a_store_that_is_frozen_is_not_hammered(monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.silent() as endpoint:
        proxy = FaultProxy(endpoint)
        with proxy.running() as through, store_at(through, "run", monkeypatch) as store:

            def ask(n: int) -> None:
                with pytest.raises(StoreError):
                    store.get(f"k/{n}")

            threads = ThreadPoolExecutor(16)
            asked = [threads.submit(ask, n) for n in range(16)]
            time.sleep(12)
            requests = len(proxy.log)
            store.close()
            for call in asked:
                call.result(10)
            threads.shutdown()
    assert 16 < requests <= 32, "a few ask for all"
