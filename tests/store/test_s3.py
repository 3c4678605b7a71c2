"""What can go wrong between us and an S3 server, and what is said then."""

from __future__ import annotations

import email.utils
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    ConfigurationError,
    CorruptObject,
    NotFound,
    StoreUnavailable,
    UnreadableFile,
)
from sidecar.store.protocol import Verification
from sidecar.store.s3.store import S3Options, S3Store
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.ports import free_port
from tests.servers import Answer, Proxy, Request, Rule, s3_error
from tests.store.conftest import BUCKET, Source, _make_bucket, read_all

MIB = 1 << 20
Opener = Callable[..., S3Store]


@pytest.fixture
def opener(credentials_dir: Path) -> Opener:
    def open_at(endpoint: str, **options: object) -> S3Store:
        chosen = {"bucket": BUCKET, "prefix": uuid.uuid4().hex, "credentials_dir": credentials_dir} | options
        return S3Store(S3Options(endpoint_url=endpoint, **chosen))  # type: ignore[arg-type]

    return open_at


@pytest.fixture
def moto(moto_endpoint: str) -> str:
    _make_bucket(moto_endpoint)
    return moto_endpoint


@pytest.fixture
def plain(tmp_path: Path) -> Source:
    return Source(tmp_path, Verification.MD5)


def always(answer: Answer) -> Proxy:
    return Proxy(rule=lambda _: answer)


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


# It answers, but not to us.


def test_a_missing_bucket_is_named(opener: Opener, moto: str) -> None:
    with pytest.raises(AccessRefused, match=r"no-such-bucket.*NoSuchBucket.*create it"):
        opener(moto, bucket="no-such-bucket").probe()


def test_a_wrong_secret_key_is_named_and_not_shown(opener: Opener, real_endpoint: str, tmp_path: Path) -> None:
    _make_bucket(real_endpoint)
    secret = servers.write_credentials(tmp_path / "wrong", secret_key="my-wrong-secret")
    with pytest.raises(AccessRefused, match="AWS_SECRET_ACCESS_KEY") as caught:
        opener(real_endpoint, credentials_dir=secret).probe()
    assert "my-wrong-secret" not in str(caught.value)


def test_an_unknown_access_key_is_named(opener: Opener, real_endpoint: str, tmp_path: Path) -> None:
    _make_bucket(real_endpoint)
    secret = servers.write_credentials(tmp_path / "wrong", access_key="nobody")
    with pytest.raises(AccessRefused, match="AWS_ACCESS_KEY_ID"):
        opener(real_endpoint, credentials_dir=secret).probe()


def test_rotated_credentials_are_used_without_a_restart(opener: Opener, real_endpoint: str, tmp_path: Path) -> None:
    _make_bucket(real_endpoint)
    secret = servers.write_credentials(tmp_path / "secret", secret_key="expired")
    store = opener(real_endpoint, credentials_dir=secret)
    with pytest.raises(AccessRefused):
        store.put("k", b"")
    servers.write_credentials(secret)
    assert store.put("k", b"now").size_bytes == 3


def test_no_credentials_anywhere_are_named(opener: Opener, moto: str) -> None:
    with pytest.raises(AccessRefused, match=r"no credentials.*CKPT_CREDENTIALS_DIR"):
        opener(moto, credentials_dir=None).probe()


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("AccessDenied", 403, "ListObjectsV2 was denied: grant s3:ListBucket"),
        ("ExpiredToken", 400, "expired: renew them"),
        ("InvalidToken", 400, "AWS_SESSION_TOKEN"),
        ("NotImplemented", 501, "does not implement"),
        ("SomethingNew", 400, "SomethingNew: of a new kind"),
    ],
)
def test_a_refusal_says_what_to_change(opener: Opener, code: str, status: int, said: str) -> None:
    with (
        always(s3_error(status, code, message="of a new kind")).running() as endpoint,
        pytest.raises(AccessRefused, match=said) as caught,
    ):
        opener(endpoint).probe()
    assert not caught.value.transient
    assert servers.SECRET_KEY not in str(caught.value)


def test_a_denied_write_names_its_permission(opener: Opener, moto: str) -> None:
    def rule(request: Request) -> Answer | None:
        return s3_error(403, "AccessDenied") if request.method == "PUT" else None

    with Proxy(moto, rule).running() as endpoint, pytest.raises(AccessRefused, match="grant s3:PutObject"):
        opener(endpoint).probe()


def test_a_denied_deletion_names_its_permission(opener: Opener, moto: str) -> None:
    body = b"<DeleteResult><Error><Key>x/k</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"

    def rule(request: Request) -> Answer | None:
        return (200, {"Content-Type": "application/xml"}, body) if "delete" in request.query else None

    with Proxy(moto, rule).running() as endpoint, pytest.raises(AccessRefused, match=r"x/k.*grant s3:DeleteObject"):
        opener(endpoint).probe()


def test_another_region_is_named(opener: Opener) -> None:
    answer = s3_error(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-central-1"})
    with always(answer).running() as endpoint, pytest.raises(AccessRefused, match=r"AWS_DEFAULT_REGION.*eu-central-1"):
        opener(endpoint).put("k", b"")


def test_a_wrong_clock_is_named_with_the_difference(opener: Opener) -> None:
    date = email.utils.formatdate(time.time() + 7200, usegmt=True)
    with (
        always(s3_error(403, "RequestTimeTooSkewed", Date=date)).running() as endpoint,
        pytest.raises(AccessRefused, match=r"clock is (7[12][0-9]{2}) s behind"),
    ):
        opener(endpoint).get("k")


# TLS.


def test_an_unknown_certificate_is_refused_until_it_is_trusted(opener: Opener, moto: str, tmp_path: Path) -> None:
    context, certificate = servers.self_signed(tmp_path)
    with Proxy(moto, tls=context).running() as endpoint:
        with pytest.raises(AccessRefused, match=r"not trusted.*CKPT_CA_BUNDLE"):
            opener(endpoint).probe()
        trusting = opener(endpoint, ca_bundle=certificate)
        assert trusting.probe().verification is Verification.MD5
        assert trusting.put("k", b"x").size_bytes == 1


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
def test_verification_of_the_certificate_can_be_switched_off(opener: Opener, moto: str, tmp_path: Path) -> None:
    context, _ = servers.self_signed(tmp_path)
    with Proxy(moto, tls=context).running() as endpoint:
        assert opener(endpoint, verify_tls=False).put("k", b"x").size_bytes == 1


def test_https_spoken_to_a_plain_server_is_named(opener: Opener, moto: str) -> None:
    with pytest.raises(AccessRefused, match="https where the store speaks http"):
        opener(moto.replace("http:", "https:")).probe()


def test_http_spoken_to_a_tls_server_is_named(opener: Opener, tmp_path: Path) -> None:
    said = b"<html><body>The plain HTTP request was sent to HTTPS port</body></html>"  # as nginx says it
    with (
        always((400, {"Content-Type": "text/html"}, said)).running() as endpoint,
        pytest.raises(AccessRefused, match="http or https right"),
    ):
        opener(endpoint).probe()
    context, _ = servers.self_signed(tmp_path)
    with Proxy(tls=context).running() as endpoint, pytest.raises((AccessRefused, StoreUnavailable)):
        opener(endpoint.replace("https:", "http:")).probe()


def test_what_does_not_speak_http_is_named(opener: Opener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _address = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(AccessRefused, match="does not speak S3"):
            opener(f"http://127.0.0.1:{server.getsockname()[1]}").get("k")
        thread.join()


def test_what_answers_everything_with_a_page_is_named(opener: Opener) -> None:
    with always((200, {"Content-Type": "text/html"}, b"<html><body>Welcome</body></html>")).running() as endpoint:
        store = opener(endpoint)
        asked: list[Callable[[], object]] = [
            lambda: list(store.list("")),
            lambda: list(store.pending_uploads("")),
            lambda: list(store.list_parts("k", "u")),
            lambda: store.begin_upload("k"),
            lambda: store.complete_upload("k", "u", [], crc64nvme=0),
        ]
        for ask in asked:
            with pytest.raises(AccessRefused, match="does not speak S3"):
                ask()


# Bytes that change on the way.


def flip(request: Request) -> None:
    middle = len(request.body) // 2
    request.body = request.body[:middle] + bytes([request.body[middle] ^ 1]) + request.body[middle + 1 :]


def send_and_join(store: S3Store, source: Source, upload_id: str, content: bytes) -> None:
    part = source.part(store, "parts", upload_id, 1, content)
    store.complete_upload("parts", upload_id, [part], crc64nvme=checksum(content))


class Damaging:
    """Flips a bit of each large body while ``on``, before a store looks at it."""

    def __init__(self, check: Rule) -> None:
        self.on = False
        self._check = check

    def __call__(self, request: Request) -> Answer | None:
        if self.on and request.method == "PUT" and len(request.body) > 1000:
            flip(request)
        return self._check(request)


@pytest.mark.parametrize(
    ("check", "verification"),
    [
        (lambda _: None, Verification.MD5),
        (servers.compare_hashes, Verification.SIGNED_SHA256),
        (servers.ChecksumRule(), Verification.STORE_CRC),
        (servers.ChecksumRule(wants_parts="InvalidRequest"), Verification.STORE_CRC),
        (servers.ChecksumRule(wants_parts="InvalidArgument"), Verification.STORE_CRC),  # MinIO
    ],
)
def test_a_body_damaged_on_the_way_up_is_noticed_and_not_kept(
    opener: Opener, moto: str, tmp_path: Path, check: Rule, verification: Verification
) -> None:
    damage = Damaging(check)
    content = b"w" * 5000
    with Proxy(moto, damage).running() as endpoint:
        store = opener(endpoint)
        assert store.probe().verification is verification
        source = Source(tmp_path, verification)
        damage.on = True
        with pytest.raises(CorruptObject):
            source.put(store, "whole", content)
        with pytest.raises(NotFound):
            store.stat("whole")
        upload_id = store.begin_upload("parts")
        with pytest.raises(CorruptObject):  # at once, or when they are joined
            send_and_join(store, source, upload_id, content)
        with pytest.raises(NotFound):
            store.stat("parts")
        damage.on = False
        send_and_join(store, source, upload_id, content)
        assert store.get("parts") == content


def test_a_small_object_damaged_on_the_way_up_is_refused_by_a_store_that_looks_at_its_md5(opener: Opener) -> None:
    proxy = Proxy(rule=lambda request: s3_error(400, "BadDigest") if "Content-MD5" in request.headers else None)
    with proxy.running() as endpoint, pytest.raises(CorruptObject, match="BadDigest"):
        opener(endpoint).put("k", b"manifest")


def test_an_answer_that_breaks_off_is_not_taken_for_the_end(opener: Opener, moto: str, plain: Source) -> None:
    proxy = Proxy(moto)
    with proxy.running() as endpoint:
        store = opener(endpoint)
        plain.put(store, "k", b"x" * 300_000)
        proxy.cut_answers_at = 100_000
        with pytest.raises(StoreUnavailable, match="k: "):
            read_all(store, "k")
        with pytest.raises(StoreUnavailable):
            read_all(store, "k", offset=5, length=200_000)
        proxy.cut_answers_at = None
        assert len(read_all(store, "k")) == 300_000


def test_a_store_that_ignores_checksums_is_not_trusted_with_them(opener: Opener, moto: str) -> None:
    def rule(request: Request) -> Answer | None:
        # Compares them for objects, and not for those joined of parts.
        crc = request.headers.get("x-amz-checksum-crc64nvme")
        return servers.ChecksumRule()(request) if request.method == "PUT" and crc and not request.is_part else None

    with Proxy(moto, rule).running() as endpoint:
        assert opener(endpoint).probe().verification is Verification.MD5


def test_without_md5s_in_etags_objects_are_read_back(opener: Opener, moto: str) -> None:
    class Kms(Proxy):
        def _pass_on(self, request: Request) -> Answer:
            status, headers, body = super()._pass_on(request)
            listed = re.sub(rb"<ETag>.*?</ETag>", b"<ETag>opaque</ETag>", body)
            headers = {name: '"opaque"' if name.lower() == "etag" else v for name, v in headers.items()}
            return status, headers | {"Content-Length": str(len(listed))}, listed

    with Kms(moto).running() as endpoint:
        assert opener(endpoint).probe().verification is Verification.READ_BACK
        with pytest.raises(ConfigurationError, match="CKPT_VERIFY=md5"):
            opener(endpoint, verify="md5").probe()


@pytest.mark.parametrize(("chosen", "verification"), [("read-back", Verification.READ_BACK), ("off", Verification.OFF)])
def test_a_chosen_verification_is_taken(opener: Opener, moto: str, chosen: str, verification: Verification) -> None:
    assert opener(moto, verify=chosen).probe().verification is verification


def test_a_store_without_conditional_writes_is_found_out(opener: Opener, moto: str) -> None:
    def rule(request: Request) -> None:
        request.headers.pop("If-None-Match", None)

    with Proxy(moto, rule).running() as endpoint:
        assert not opener(endpoint).probe().conditional_put


def test_a_store_that_wants_the_bucket_in_the_host_is_found_out(
    opener: Opener, moto: str, plain: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rule(request: Request) -> Answer | None:
        host = next(value for name, value in request.headers.items() if name.lower() == "host")
        if not host.startswith(f"{BUCKET}.store.test"):
            return s3_error(403, "SecondLevelDomainForbidden")
        request.headers = {n: v for n, v in request.headers.items() if n.lower() != "host"} | {"Host": urlsplit(moto).netloc}
        request.path = f"/{BUCKET}{request.path}"
        return None

    resolve = socket.getaddrinfo
    local = lambda host, *rest, **more: resolve("127.0.0.1" if host.endswith("store.test") else host, *rest, **more)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", local)
    with Proxy(moto, rule).running() as endpoint:
        store = opener(endpoint.replace("127.0.0.1", "store.test"))
        store.probe()
        plain.put(store, "k", b"weights" * 1000)
        assert read_all(store, "k") == b"weights" * 1000


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

    def rule(request: Request) -> Answer | None:
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
        opener(endpoint).put_file("k", body)
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

        thread = threading.Thread(target=serve)
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
