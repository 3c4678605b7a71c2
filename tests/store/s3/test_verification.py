"""What changes on the way to a store is noticed, by the strongest checksum that the store enforces."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import (
    ConfigurationError,
    CorruptObject,
    NotFound,
    StoreUnavailable,
)
from sidecar.store.protocol import Verification
from sidecar.store.s3.store import S3Store
from tests import servers
from tests.servers import Proxy, ProxyAnswer, Request, Rule, s3_error
from tests.store.conftest import BUCKET, Source, _make_bucket, read_all
from tests.store.s3.conftest import Opener

MIB = 1 << 20


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

    def __call__(self, request: Request) -> ProxyAnswer | None:
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


def test_a_damaged_document_is_deleted_though_its_deletion_is_damaged_too(opener: Opener, moto: str) -> None:
    """``run.json`` stayed damaged, and every pod of the run ended with "is not this system's" (campaign 90228)."""
    deletions: list[bytes] = []

    def damage(request: Request) -> None:
        request.headers.pop("Content-MD5", None)  # of a store that does not look at it
        if request.method == "PUT" and request.path.endswith("/k") and not deletions:
            request.body = request.body.replace(b"manifest", b"manifesu")
        elif request.method == "POST" and "delete" in request.query:
            deletions.append(request.body)
            if len(deletions) == 1:
                request.body = request.body.replace(b"/k<", b"/j<")

    with Proxy(moto, damage).running() as endpoint:
        store = opener(endpoint)
        store.verification = Verification.MD5
        store._etags_are_md5 = True
        with pytest.raises(CorruptObject):
            store.put("k", b"manifest", only_if_absent=True)
        assert len(deletions) == 2
        with pytest.raises(NotFound):
            store.stat("k")
        store.put("k", b"manifest", only_if_absent=True)
        assert store.get("k") == b"manifest"


def test_a_small_object_damaged_on_the_way_up_is_refused_by_a_store_that_looks_at_its_md5(opener: Opener) -> None:
    proxy = Proxy(rule=lambda request: s3_error(400, "BadDigest") if "Content-MD5" in request.headers else None)
    with proxy.running() as endpoint, pytest.raises(CorruptObject, match="BadDigest"):
        opener(endpoint).put("k", b"manifest")


@pytest.mark.parametrize("server", ["moto", *servers.REAL_STORES])
def test_a_document_that_is_damaged_on_its_way_is_there_at_no_time(
    server: str, opener: Opener, request: pytest.FixtureRequest
) -> None:
    """Before its writer finds the damage and deletes it, another node may have committed what it says."""
    endpoint = request.getfixturevalue(f"{server}_endpoint")
    _make_bucket(endpoint)
    refused: list[int] = []

    def damage(request: Request) -> ProxyAnswer | None:
        if request.method != "PUT":
            return None
        flip(request)
        answer = proxy._pass_on(request)
        refused.append(answer[0])
        return answer

    proxy = Proxy(endpoint, damage)
    with proxy.running() as way, pytest.raises(CorruptObject):
        opener(way).put("k", b"manifest")
    assert set(refused) == {400}


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
    def rule(request: Request) -> ProxyAnswer | None:
        # Compares them for objects, and not for those joined of parts.
        crc = request.headers.get("x-amz-checksum-crc64nvme")
        return servers.ChecksumRule()(request) if request.method == "PUT" and crc and not request.is_part else None

    with Proxy(moto, rule).running() as endpoint:
        assert opener(endpoint).probe().verification is Verification.MD5


@pytest.mark.parametrize(("joined", "is_refused"), [(b"sent", False), (b"damaged", True)])
def test_the_checking_server_compares_the_part_whose_etag_is_named(joined: bytes, is_refused: bool) -> None:
    """The last request of a part that arrives may be one whose answer nobody waited for."""
    rule = servers.ChecksumRule()
    for body in (b"damaged", b"sent"):
        assert rule(Request("PUT", "/bucket/key?uploadId=u&partNumber=1", {}, body)) is None
    part = f"<Part><PartNumber>1</PartNumber><ETag>&quot;{hashlib.md5(joined).hexdigest()}&quot;</ETag></Part>"
    crc = {"x-amz-checksum-crc64nvme": base64.b64encode(checksum(b"sent").to_bytes(8, "big")).decode()}
    assert (rule(Request("POST", "/bucket/key?uploadId=u", crc, part.encode())) is not None) == is_refused


def test_without_md5s_in_etags_objects_are_read_back(opener: Opener, moto: str) -> None:
    class Kms(Proxy):
        def _pass_on(self, request: Request) -> ProxyAnswer:
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
    def rule(request: Request) -> ProxyAnswer | None:
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
