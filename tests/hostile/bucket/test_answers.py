"""Answers that never end, lead elsewhere or are compressed: they cost time while they last, and neither memory nor a step."""

from __future__ import annotations

import gzip
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.hostile.bucket.forged import Forged, content_of
from tests.hostile.bucket.liar import Liar
from tests.hostile.checks import check_log, most_memory_mib
from tests.process.conftest import BUCKET, Place
from tests.process.sidecar_process import contents, sidecar, until
from tests.servers import Proxy, Request

LIE_S = 3.0
SLOW = pytest.mark.slow
ON_MOTO = pytest.mark.parametrize("place", ["moto"], indirect=True)


def head(status: str, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode()


def endless(*fields: str) -> Iterator[bytes]:
    yield head("200 OK", *fields)
    yield from itertools.repeat(b" " * 65_536)


def endless_chunks() -> Iterator[bytes]:
    yield head("200 OK", "Transfer-Encoding: chunked", 'ETag: "9a0364b9e99bb480dd25e1f0284c8555"')
    yield from itertools.repeat(b"10000\r\n" + b" " * 65_536 + b"\r\n")


def compressed() -> list[bytes]:
    content = gzip.compress(bytes(100 << 20))
    return [head("200 OK", "Content-Encoding: gzip", f"Content-Length: {len(content)}") + content]


BODIES: dict[str, Callable[[], Iterable[bytes]]] = {
    "endless": endless,
    "ten gigabytes": lambda: endless(f"Content-Length: {10 << 30}"),
    "endless chunks": endless_chunks,
    "a bomb": compressed,
}


def of_object(name: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "GET" and "list-type" not in request.query and request.path.endswith(name)


def tells(liar: Liar, place: Place, tmp_path: Path, endpoint: str) -> None:
    """Ask for a resume while the liar lies, let it stop, and check that the newest step came whole."""
    settings = place.settings | {"AWS_S3_ENDPOINT": endpoint, "CKPT_RESUME": "on-demand"}
    with sidecar(tmp_path / "volume", settings) as running:
        asked = running.ready().call("POST", "/v1/resume", {"checkpoint": "latest"})["id"]
        until(lambda: liar.told > 0)
        time.sleep(LIE_S)
        assert running.call("GET", f"/v1/resume/{asked}")["state"] in ("choosing", "downloading")
        liar.lie = lambda _: None
        answer = running.answer(asked, timeout_s=90)
        assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-20")
        assert contents(running.volume / "checkpoint-20") == {"model": content_of(20)}
        assert most_memory_mib(running) < 300
        assert running.terminate() == 0
    check_log(running)


@ON_MOTO
@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("endless", "checkpoint-20/.complete"),
        pytest.param("ten gigabytes", "checkpoint-20/.complete", marks=SLOW),
        pytest.param("endless chunks", "checkpoint-20/model", marks=SLOW),
        pytest.param("a bomb", "checkpoint-20/model", marks=SLOW),
        pytest.param("a bomb", "checkpoint-20/.ckpt/a/node-00000-of-00001.json", marks=SLOW),
    ],
)
def test_a_body_without_an_end_takes_no_memory_and_no_step(said: str, key: str, place: Place, tmp_path: Path) -> None:
    for step in (10, 20):
        Forged(step).put(place.store)
    liar, is_asked = Liar(place.settings["AWS_S3_ENDPOINT"]), of_object(key)
    with liar.running() as endpoint:
        liar.lie = lambda request: BODIES[said]() if is_asked(request) else None
        tells(liar, place, tmp_path, endpoint)


def listing(prefix: str, name: str, number: int, *, token: str) -> Iterable[bytes]:
    """Return one page of a listing that goes on. ``name``: of its entries, with a number; with a slash at its end: folders."""
    entry = "<CommonPrefixes><Prefix>{}</Prefix></CommonPrefixes>"
    if not name.endswith("/"):
        entry = "<Contents><Key>{}</Key><Size>1</Size><ETag>&quot;x&quot;</ETag></Contents>"
    entries = "".join(entry.format(quote(f"{prefix}{name % (number * 1000 + n)}")) for n in range(1000))
    text = (
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType>'
        f"<Name>{BUCKET}</Name><IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        f"{entries}</ListBucketResult>"
    )
    content = text.encode()
    return [head("200 OK", "Content-Type: application/xml", f"Content-Length: {len(content)}") + content]


@ON_MOTO
@pytest.mark.parametrize(
    ("inside", "repeats"),
    [("", False), pytest.param("", True, marks=SLOW), pytest.param("checkpoint-20/", False, marks=SLOW)],
)
def test_a_listing_without_an_end_takes_no_memory_and_no_step(inside: str, repeats: bool, place: Place, tmp_path: Path) -> None:
    for step in (10, 20):
        Forged(step).put(place.store)
    liar, numbers = Liar(place.settings["AWS_S3_ENDPOINT"]), itertools.count()

    def lie(request: Request) -> Iterable[bytes] | None:
        prefix = request.query.get("prefix", "")
        is_it = "list-type" in request.query and prefix.endswith(f"/{inside}")
        if not is_it or (not inside and "delimiter" not in request.query):
            return None
        number = next(numbers)
        return listing(prefix, "junk-%d" if inside else "junk-%d/", number, token="same" if repeats else f"t{number}")

    with liar.running() as endpoint:
        liar.lie = lie
        tells(liar, place, tmp_path, endpoint)


@ON_MOTO
@SLOW
@pytest.mark.parametrize("status", ["301 Moved Permanently", "307 Temporary Redirect"])
def test_a_redirect_leads_nowhere(status: str, place: Place, tmp_path: Path) -> None:
    """The server there would get signed requests, and could answer with other weights."""
    for step in (10, 20):
        Forged(step).put(place.store)
    liar, elsewhere = Liar(place.settings["AWS_S3_ENDPOINT"]), Proxy(place.settings["AWS_S3_ENDPOINT"])
    with elsewhere.running() as other, liar.running() as endpoint:
        liar.lie = lambda request: (
            [head(status, f"Location: {other}{request.path}", "Content-Length: 0")]
            if "checkpoint-20/" in request.path
            else None
        )
        tells(liar, place, tmp_path, endpoint)
    assert elsewhere.seen == []
