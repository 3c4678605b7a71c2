"""The control plane: what aiobotocore does not check, what is cancelled, and what a request may cost."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote_plus

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.core.schedule import hedging
from sidecar.errors import Stopped, StoreUnavailable
from sidecar.store.cancellation import Cancellation, result_of
from sidecar.store.protocol import PendingUpload, Stored, Verification
from sidecar.store.s3 import loop
from sidecar.store.s3.store import S3Options, S3Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from tests import servers
from tests.servers import ChecksumRule, Proxy, Request
from tests.store.conftest import BUCKET, Source, _make_bucket
from tests.store.scripted import CONTENT, ETAG, ROOT, Asked, answering, document, s3

SOON_S = 5.0
MORE = "<IsTruncated>true</IsTruncated>"


@contextlib.contextmanager
def store_at(endpoint: str, credentials_dir: Path) -> Iterator[S3Store]:
    store = S3Store(S3Options(bucket="b", prefix="run", endpoint_url=endpoint, credentials_dir=credentials_dir))
    yield store
    store.close()


LISTINGS: dict[str, tuple[str, str, Callable[[S3Store], object]]] = {
    "list": ("List", "ListBucketResult", lambda store: list(store.list(""))),
    "list_parts": ("ListParts", "ListPartsResult", lambda store: list(store.list_parts("k", "u"))),
    "pending_uploads": ("ListUploads", "ListMultipartUploadsResult", lambda store: list(store.pending_uploads(""))),
}


@pytest.mark.parametrize("listing", LISTINGS)
@pytest.mark.parametrize(
    "markers",
    [
        "",
        "<NextContinuationToken>t</NextContinuationToken><NextPartNumberMarker>1</NextPartNumberMarker>"
        "<NextKeyMarker>run/k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>",
    ],
    ids=["nowhere", "the same page again"],
)
def test_a_page_that_does_not_lead_on_is_not_the_end(listing: str, markers: str, credentials_dir: Path) -> None:
    operation, root, ask = LISTINGS[listing]

    def script(asked: Asked) -> bytes:
        return document(f"<{root} {ROOT}>{MORE}{markers}</{root}>") if asked.operation == operation else s3(asked)

    with answering(script) as endpoint, store_at(endpoint, credentials_dir) as store, pytest.raises(StoreUnavailable):
        ask(store)


KEYS = ["run/a b+c%20d", "run/größe/模型", "run/<&>'\"", "run/line\nfeed\tand\rreturn"]


def test_all_pages_are_read_and_keys_are_decoded(credentials_dir: Path) -> None:
    def script(asked: Asked) -> bytes:
        number = int(asked.query.get("continuation-token", "0") or 0)
        more = f"{MORE}<NextContinuationToken>{number + 1}</NextContinuationToken>" if number < len(KEYS) - 1 else ""
        told = f"<Key>{quote_plus(KEYS[number])}</Key><Size>{number}</Size><ETag>&quot;{ETAG}&quot;</ETag>"
        inner = f"<EncodingType>url</EncodingType>{more}<Contents>{told}</Contents>"
        return document(f"<ListBucketResult {ROOT}>{inner}</ListBucketResult>")

    with answering(script) as endpoint, store_at(endpoint, credentials_dir) as store:
        wanted = [Stored(key.removeprefix("run/"), number, ETAG) for number, key in enumerate(KEYS)]
        assert list(store.list("")) == wanted


def test_all_pages_of_unfinished_uploads_are_read(credentials_dir: Path) -> None:
    asked_after: list[str] = []

    def script(asked: Asked) -> bytes:
        asked_after.append(asked.query.get("key-marker", ""))
        number = len(asked_after) - 1
        key = quote_plus(KEYS[number])
        more = f"{MORE}<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>"
        inner = f"<EncodingType>url</EncodingType><Upload><Key>{key}</Key><UploadId>u{number}</UploadId></Upload>"
        inner += more if number < len(KEYS) - 1 else ""
        return document(f"<ListMultipartUploadsResult {ROOT}>{inner}</ListMultipartUploadsResult>")

    with answering(script) as endpoint, store_at(endpoint, credentials_dir) as store:
        wanted = [PendingUpload(key.removeprefix("run/"), f"u{number}") for number, key in enumerate(KEYS)]
        assert list(store.pending_uploads("")) == wanted
    assert asked_after == ["", *KEYS[:-1]]


@pytest.mark.parametrize("inner", ["<Key>run/k</Key>", "<Key>run/k</Key><Size>large</Size>", "<Key>run/k</Key><Size>-1</Size>"])
def test_an_object_without_its_size_is_not_listed(inner: str, credentials_dir: Path) -> None:
    listing = document(f"<ListBucketResult {ROOT}><Contents>{inner}</Contents></ListBucketResult>")
    with (
        answering(lambda _: listing) as endpoint,
        store_at(endpoint, credentials_dir) as store,
        pytest.raises(StoreUnavailable),
    ):
        list(store.list(""))


def test_a_store_that_wants_it_gets_the_checksum_of_each_part_again(
    moto_endpoint: str, credentials_dir: Path, tmp_path: Path
) -> None:
    _make_bucket(moto_endpoint)
    proxy, content = Proxy(moto_endpoint, ChecksumRule(wants_parts="InvalidArgument")), b"weights"
    with proxy.running() as endpoint:
        options = S3Options(bucket=BUCKET, prefix="parts", endpoint_url=endpoint, credentials_dir=credentials_dir)
        store = S3Store(options)
        assert store.probe().verification is Verification.STORE_CRC
        upload_id = store.begin_upload("k")
        part = Source(tmp_path, Verification.STORE_CRC).part(store, "k", upload_id, 1, content)
        store.complete_upload("k", upload_id, [part], crc64nvme=checksum(content))
        store.close()
    completed = [request for request in proxy.seen if request.method == "POST" and "uploadId" in request.query][-1]
    assert completed.body.count(b"<ChecksumCRC64NVME>") == 1


def test_what_a_killed_probe_left_is_deleted_once_it_is_old(moto_endpoint: str, credentials_dir: Path) -> None:
    _make_bucket(moto_endpoint)

    class Later(Proxy):
        """Says of one object that it was written two hours ago."""

        def _pass_on(self, request: Request) -> servers.ProxyAnswer:
            status, headers, body = super()._pass_on(request)
            before, mark, after = body.partition(b".ckpt-probe/old</Key><LastModified>")
            if mark:
                body = before + mark + b"2020-01-01T00:00:00.000Z" + after[after.index(b"<") :]
            return status, headers | {"Content-Length": str(len(body))}, body

    with Later(moto_endpoint).running() as endpoint:
        options = S3Options(bucket=BUCKET, prefix="leftovers", endpoint_url=endpoint, credentials_dir=credentials_dir)
        store = S3Store(options)
        store.put(".ckpt-probe/old", b"")
        store.put(".ckpt-probe/new", b"")
        store.probe()
        assert [found.key for found in store.list("")] == [".ckpt-probe/new"]
        store.close()


# Cancellation and deadlines.


def test_a_cancelled_request_ends_at_once_and_its_thread_is_free(credentials_dir: Path) -> None:
    ended = threading.Event()

    async def run(store: S3Store) -> None:
        executor = StoreExecutor(concurrency=1, gate=RateGate(None), health=Health())

        def get() -> None:
            try:
                store.get("k")
            finally:
                ended.set()

        task = asyncio.create_task(executor.once(get))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        executor.close()

    with servers.silent() as endpoint, store_at(endpoint, credentials_dir) as store:
        asyncio.run(run(store))
        assert ended.wait(SOON_S)


def test_a_cancelled_call_makes_no_further_request(credentials_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(request: Future[object]) -> object:  # as on a busy machine
        time.sleep(0.3)
        return result_of(request)

    monkeypatch.setattr(loop, "result_of", late)
    monkeypatch.setattr(hedging, "UNKNOWN_S", 30.0)  # beside other tests an answer may be late
    cancellation, asked = Cancellation(), list[Asked]()
    with answering(s3, asked) as endpoint, store_at(endpoint, credentials_dir) as store:
        assert cancellation.run(lambda: store.get("k")) == CONTENT
        cancellation.cancel()
        with pytest.raises(Stopped):
            cancellation.run(lambda: store.get("k"))
    assert len(asked) == 1


def test_a_store_that_is_closed_ends_its_requests(credentials_dir: Path) -> None:
    with servers.silent() as endpoint, store_at(endpoint, credentials_dir) as store, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(store.get, "k")
        time.sleep(0.5)
        store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            waiting.result(SOON_S)


def test_a_life_imports_one_client_of_s3() -> None:
    code = "import sys, sidecar.store.s3.store as s; print(sorted({'boto3', 'aiobotocore'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "['aiobotocore']\n"
