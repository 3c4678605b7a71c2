"""Every operation, and everything that something other than the store may answer: no error or success is believed of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    CorruptObject,
    NotFound,
    OversizedDocument,
    PartRefused,
    StoreError,
    StoreUnavailable,
)
from sidecar.store.protocol import Stored, Verification
from sidecar.store.s3 import control, transport
from sidecar.store.s3.client import Clients
from sidecar.store.s3.probe import probe
from sidecar.store.s3.store import S3Options, S3Store
from tests.marks import slow
from tests.servers import Proxy, ProxyAnswer, Request
from tests.store.conftest import BUCKET, _make_bucket, read_all
from tests.store.s3.foreign_answers import (
    BADLY_FRAMED,
    HAS_NO_LENGTH,
    HTML,
    IS_JSON,
    JSON,
    NGINX,
    NOT_OF_S3,
    OPERATIONS,
    PAGE,
    RARE,
    WORDS_OF_S3,
    Operation,
    chunked,
    content_of,
    reframed,
)
from tests.store.scripted import CONTENT, ETAG, JOINED, ROOT, Asked, answering, document, error, head, s3, whole


class Scripted:
    """A server whose script can be exchanged, and a store that uses it: making one takes longer than most of these tests."""

    def __init__(self, credentials_dir: Path) -> None:
        self.script: Callable[[Asked], bytes | Iterable[bytes]] = s3
        self.asked: list[Asked] = []
        self._answering = answering(lambda asked: self.script(asked), self.asked)
        endpoint = self._answering.__enter__()
        options = S3Options(bucket="b", prefix="run", endpoint_url=endpoint, credentials_dir=credentials_dir, read_timeout_s=10)
        self.store = S3Store(options)

    def harm(self, operation: str, script: Callable[[Asked], bytes | Iterable[bytes]]) -> None:
        """Let the script answer one kind of request, and S3 the others."""
        self.script = lambda asked: script(asked) if asked.operation == operation else s3(asked)

    def close(self) -> None:
        self.store.close()
        self._answering.__exit__(None, None, None)


@pytest.fixture(scope="module")
def shared(credentials_dir: Path) -> Iterator[Scripted]:
    made = Scripted(credentials_dir)
    yield made
    made.close()


@pytest.fixture
def scripted(shared: Scripted, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setattr(transport, "AGAIN_IN_S", 0.0)
    monkeypatch.setattr(Clients, "forget", lambda _: None)
    shared.script = s3
    shared.asked.clear()
    shared.store.verification = Verification.MD5
    return shared


def check_nothing_is_believed(store: S3Store, why: str, operation: Operation) -> None:
    with pytest.raises(StoreError) as caught:
        raise AssertionError(f"{why}: returned {operation(store)!r}")
    assert not isinstance(caught.value, WORDS_OF_S3), f"{why}: {type(caught.value).__name__}: {caught.value}"
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("said", [*(said for said in NOT_OF_S3 if said not in RARE), *slow(*RARE)])
def test_an_answer_that_is_not_of_s3_is_believed_for_no_operation(said: str, scripted: Scripted) -> None:
    answer = NOT_OF_S3[said]

    def not_of_s3(_: Asked) -> bytes | Iterable[bytes]:
        return answer if isinstance(answer, bytes) else answer()

    for name, (operation, harmed) in OPERATIONS.items():
        scripted.script = not_of_s3
        check_nothing_is_believed(scripted.store, f"{name}, {said}", operation)
        scripted.harm(harmed, not_of_s3)
        check_nothing_is_believed(scripted.store, f"{name}, {said} to {harmed} alone", operation)


@pytest.mark.parametrize("framing", BADLY_FRAMED)
def test_an_answer_of_s3_whose_frame_is_wrong_is_not_believed(framing: str, scripted: Scripted) -> None:
    for name, (operation, harmed) in OPERATIONS.items():
        if name != HAS_NO_LENGTH:
            scripted.harm(harmed, lambda asked: BADLY_FRAMED[framing](s3(asked)))
            check_nothing_is_believed(scripted.store, f"{name}, {framing}", operation)


@pytest.mark.parametrize(
    "place",
    [
        "",
        "bytes 0-3/7",
        "bytes 3-5/7",
        "bytes 3-7/8",
        "bytes 6-3/7",
        "bytes 3-6/5",
        "bytes */7",
        "items 3-6/7",
        "bytes 3-6",
        "3",
    ],
)
def test_a_range_that_was_not_asked_for_is_not_taken(place: str, scripted: Scripted) -> None:
    def script(asked: Asked) -> bytes:
        if asked.operation != "GET":
            return s3(asked)
        return whole("206 Partial Content", CONTENT[3:7], f'ETag: "{ETAG}"', *([f"Content-Range: {place}"] if place else []))

    scripted.script = script
    with pytest.raises(StoreUnavailable, match="bytes 3 to 6"):
        read_all(scripted.store, "k", offset=3, length=4)


def test_the_server_of_these_tests_is_understood(scripted: Scripted) -> None:
    store = scripted.store
    for name, (operation, _) in OPERATIONS.items():
        if name != "probe":
            operation(store)
    assert store.stat("k") == Stored("k", len(CONTENT), ETAG)
    assert store.copy("k", "target", etag=ETAG) == Stored("target", len(CONTENT), ETAG)


@pytest.mark.parametrize(
    "framing",
    [
        lambda raw: reframed(raw, "Transfer-Encoding: chunked", content=chunked(content_of(raw))),
        lambda raw: reframed(raw),
        lambda raw: head("100 Continue") + head("103 Early Hints", "Link: </a>") + raw,
        lambda raw: raw.replace(b"HTTP/1.1 ", b"HTTP/1.0 ").replace(b"\r\n", b"\n"),
    ],
    ids=["chunks", "until the end", "interim answers", "HTTP/1.0"],
)
def test_an_answer_of_s3_counts_however_it_is_framed(framing: Callable[[bytes], bytes], scripted: Scripted) -> None:
    scripted.script = lambda asked: framing(s3(asked)) if asked.operation != "Abort" else s3(asked)
    store = scripted.store
    for name, (operation, _) in OPERATIONS.items():
        if name != "probe":
            operation(store)
    assert store.get("k") == CONTENT
    assert read_all(store, "k") == CONTENT
    assert read_all(store, "k", offset=3, length=4) == CONTENT[3:7]


@pytest.mark.parametrize(
    ("operation", "answer", "raised"),
    [
        ("get", error("404 Not Found", "NoSuchKey"), NotFound),
        ("read_range", error("404 Not Found", "NoSuchKey"), NotFound),
        ("upload_part", error("404 Not Found", "NoSuchUpload"), NotFound),
        ("list_parts", error("404 Not Found", "NoSuchUpload"), NotFound),
        ("upload_part", error("400 Bad Request", "InvalidArgument"), PartRefused),
        ("get", error("400 Bad Request", "InvalidArgument"), AccessRefused),
        ("copy", error("404 Not Found", "NoSuchKey"), NotFound),
        ("copy", error("200 OK", "NoSuchKey"), NotFound),
        ("copy", error("412 Precondition Failed", "PreconditionFailed"), CorruptObject),
        ("read_known", error("412 Precondition Failed", "PreconditionFailed"), CorruptObject),
        ("read_range", error("416 Range Not Satisfiable", "InvalidRange"), CorruptObject),
        ("put", error("400 Bad Request", "BadDigest"), CorruptObject),
        ("complete_upload", error("200 OK", "InternalError"), StoreUnavailable),
        ("get", error("404 Not Found", "NoSuchBucket"), AccessRefused),
        ("get", error("403 Forbidden", "AccessDenied"), AccessRefused),
    ],
)
def test_the_words_of_s3_are_believed(operation: str, answer: bytes, raised: type[StoreError], scripted: Scripted) -> None:
    call, harmed = OPERATIONS[operation]
    scripted.script = lambda asked: answer if asked.operation == harmed else s3(asked)
    with pytest.raises(raised) as caught:
        call(scripted.store)
    assert type(caught.value) is raised


@pytest.mark.parametrize("verification", Verification)
@pytest.mark.parametrize("fields", [(IS_JSON, NGINX), ("Content-Type: text/plain", NGINX), (NGINX,)])
def test_a_document_whose_etag_is_not_the_stores_is_not_read(
    fields: tuple[str, ...], verification: Verification, scripted: Scripted
) -> None:
    """It would be taken for a commit that cannot be read, which protects nothing."""
    scripted.store.verification = verification
    scripted.harm("GET", lambda _: whole("200 OK", JSON[: len(CONTENT)], *fields))
    check_nothing_is_believed(scripted.store, "get", lambda store: store.get("k"))


@pytest.mark.parametrize("others_are_md5", [False, True])
def test_a_document_that_is_encrypted_in_the_store_is_read(others_are_md5: bool, scripted: Scripted) -> None:
    """Where the etags of others are MD5s, it is read twice: a damaged document would not be the same."""
    other = "e" * 32
    scripted.script = lambda asked: s3(asked).replace(ETAG.encode(), other.encode())
    scripted.store._etags_are_md5 = others_are_md5
    assert scripted.store.get("k") == CONTENT, "the listing has the same etag"
    scripted.store.verification = Verification.STORE_CRC
    scripted.asked.clear()
    assert scripted.store.get("k") == CONTENT
    assert [request.operation for request in scripted.asked] == ["GET"] * (1 + others_are_md5)


def test_an_object_on_the_page_behind_an_empty_one_is_there(scripted: Scripted) -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"

    def script(asked: Asked) -> bytes:
        is_first = asked.operation == "List" and "continuation-token" not in asked.query
        return document(f"<ListBucketResult {ROOT}>{more}</ListBucketResult>") if is_first else s3(asked)

    scripted.script = script
    assert scripted.store.stat("k") == Stored("k", len(CONTENT), ETAG)


@pytest.mark.parametrize("operation", ["stat", "list", "list_folders", "copy"])
def test_the_listing_of_another_prefix_is_not_believed(operation: str, scripted: Scripted) -> None:
    """A cache that ignores queries has it."""
    listed = "<Contents><Key>other/k</Key><Size>7</Size></Contents>"
    scripted.harm("List", lambda _: document(f"<ListBucketResult {ROOT}>{listed}</ListBucketResult>"))
    check_nothing_is_believed(scripted.store, operation, OPERATIONS[operation][0])


def test_a_firewalls_403_is_named_and_may_pass(scripted: Scripted) -> None:
    scripted.script = lambda _: whole("403 Forbidden", PAGE, HTML)
    with pytest.raises(StoreUnavailable, match=r"403.*firewall") as caught:
        scripted.store.get("k")
    assert caught.value.transient


def test_a_redirect_names_where_it_points_to_and_no_secret(scripted: Scripted) -> None:
    to = "Location: https://user:hunter2@s3.test:9000/path?X-Amz-Signature=hunter2"
    scripted.script = lambda _: whole("307 Temporary Redirect", b"", to)
    with pytest.raises(StoreUnavailable, match=r"redirected to https://s3\.test:9000: does AWS_S3_ENDPOINT"):
        scripted.store.get("k")


@pytest.mark.parametrize("says_how_much", [True, False])
def test_a_giant_document_is_not_read(says_how_much: bool, scripted: Scripted) -> None:
    sent_bytes = 0

    def script(asked: Asked) -> bytes | Iterable[bytes]:
        if asked.operation == "List":
            return s3(asked).replace(b"<Size>7<", b"<Size>7000000000000<").replace(b"Content-Length: ", b"X-Was: ")
        return giant()

    def giant() -> Iterator[bytes]:
        nonlocal sent_bytes
        yield head("200 OK", f'ETag: "{ETAG}"', "Content-Length: 7000000000000" if says_how_much else "X-A: b")
        while True:
            sent_bytes += 1 << 20
            yield b" " * (1 << 20)

    scripted.script = script
    with pytest.raises(OversizedDocument, match=r"7000000000000 bytes.*5000 at most"):
        scripted.store.get("k", most_bytes=5000)
    assert sent_bytes < 64 << 20


def test_a_giant_page_is_not_a_giant_document(scripted: Scripted) -> None:
    def script(asked: Asked) -> bytes:
        return s3(asked) if asked.operation == "List" else head("200 OK", f'ETag: "{ETAG}"', "Content-Length: 7000000000000")

    scripted.script = script
    with pytest.raises(StoreUnavailable, match="7 bytes listed"):
        scripted.store.get("k")


def test_a_copy_says_the_etag_that_the_store_gave_it_and_not_another_writers(scripted: Scripted) -> None:
    """Who looks at the object after the copy may see what another writer has put there meanwhile."""
    other = "b" * 32

    def script(asked: Asked) -> bytes:
        is_target = asked.operation == "List" and asked.query["prefix"].endswith("target")
        return s3(asked).replace(ETAG.encode(), other.encode()) if is_target else s3(asked)

    scripted.script = script
    assert scripted.store.copy("k", "target", etag=ETAG) == Stored("target", len(CONTENT), ETAG)
    assert scripted.store.stat("target").etag == other


def test_a_copy_that_is_too_large_for_one_request_is_made_in_parts(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "COPY_BYTES", 6)
    monkeypatch.setattr(control, "COPY_PART_BYTES", 3)
    assert scripted.store.copy("k", "target", etag=ETAG) == Stored("target", len(CONTENT), JOINED)
    ranges = {r.headers["x-amz-copy-source-range"] for r in scripted.asked if r.operation == "UploadPartCopy"}
    assert ranges == {"bytes=0-2", "bytes=3-5", "bytes=6-6"}
    for answer in (whole("200 OK"), whole("200 OK", PAGE, HTML, NGINX), whole("404 Not Found", PAGE, HTML)):
        scripted.asked.clear()
        scripted.harm("UploadPartCopy", lambda _, answer=answer: answer)  # type: ignore[misc]
        check_nothing_is_believed(scripted.store, "copy in parts", lambda store: store.copy("k", "target", etag=ETAG))
        assert "Abort" in [request.operation for request in scripted.asked]


def test_a_copy_of_a_source_that_is_replaced_meanwhile_does_not_count(scripted: Scripted) -> None:
    """Ceph RGW and moto do not look at the condition that the request has."""
    copied = False

    def script(asked: Asked) -> bytes:
        nonlocal copied
        copied = copied or asked.operation == "Copy"
        return s3(asked).replace(ETAG.encode(), b"c" * 32) if copied and asked.operation == "List" else s3(asked)

    scripted.script = script
    with pytest.raises(CorruptObject, match="etag c"):
        scripted.store.copy("k", "target", etag=ETAG)


def test_what_is_read_back_and_is_another_writers_is_not_deleted(scripted: Scripted) -> None:

    def script(request: Asked) -> bytes:
        return whole("200 OK", b"", f'ETag: "{"d" * 32}"') if request.operation == "PUT" else s3(request)

    scripted.script = script
    scripted.store.verification = Verification.READ_BACK
    assert scripted.store.put("k", b"what we sent").etag == "d" * 32  # written over since
    with pytest.raises(AlreadyExists):
        scripted.store.put("k", b"what we sent", only_if_absent=True)
    assert "Delete" not in [request.operation for request in scripted.asked]


@pytest.mark.parametrize("status", [404, *slow(400, 403, 412)])
def test_a_probe_that_is_answered_by_another_server_once_does_not_trust_the_store_with_more(
    status: int, moto_endpoint: str, credentials_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_bucket(moto_endpoint)
    numbers = itertools.count()
    harmed = -1

    def rule(_: Request) -> ProxyAnswer | None:
        return (status, {"Content-Type": "text/html"}, PAGE) if next(numbers) == harmed else None

    with Proxy(moto_endpoint, rule).running() as endpoint:
        monkeypatch.setattr(Clients, "forget", lambda _: None)
        store = S3Store(S3Options(bucket=BUCKET, prefix="probes", endpoint_url=endpoint, credentials_dir=credentials_dir))
        unharmed = probe(store, "auto")
        assert (unharmed.verification, unharmed.conditional_put) == (Verification.MD5, True)
        for harmed in range(next(numbers)):
            numbers = itertools.count()
            with contextlib.suppress(StoreUnavailable, AccessRefused):
                found = probe(store, "auto")
                assert (found.verification, found.conditional_put) == (Verification.MD5, True), f"request {harmed}"
