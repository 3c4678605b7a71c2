"""Operations of a store, and what something other than the store may answer to them."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator

from sidecar.core.format.checksum import checksum
from sidecar.errors import (
    AlreadyExists,
    CorruptObject,
    NotFound,
    OversizedDocument,
)
from sidecar.store.protocol import Part
from sidecar.store.s3.probe import probe
from sidecar.store.s3.store import S3Store
from sidecar.store.slice import FileSlice, OpenGate
from tests.store.conftest import read_all
from tests.store.scripted import CONTENT, ETAG, document, error, head, whole

PAGE = b"<html><head><title>Service</title></head><body><h1>Please come back later</h1></body></html>"
JSON = b'{"message": "not found", "code": "NoSuchKey", "files": []}'
HTML = "Content-Type: text/html"
IS_JSON = "Content-Type: application/json"
NGINX = 'ETag: "5f8b1c2d-267"'
ONE_PART = [Part(1, len(CONTENT), ETAG)]
WORDS_OF_S3 = (NotFound, CorruptObject, AlreadyExists, OversizedDocument)

assert hashlib.md5(CONTENT, usedforsecurity=False).hexdigest() == ETAG


def body() -> FileSlice:
    fd = os.memfd_create("body")
    os.write(fd, CONTENT)
    return FileSlice(fd, 0, len(CONTENT), gate=OpenGate(), name="k", with_md5=True)


def sent(store: S3Store, send: Callable[[FileSlice], object]) -> object:
    content = body()
    try:
        return send(content)
    finally:
        os.close(content.fd)


Operation = Callable[[S3Store], object]
OPERATIONS: dict[str, tuple[Operation, str]] = {
    "get": (lambda s: s.get("k"), "GET"),
    "put": (lambda s: s.put("k", CONTENT), "PUT"),
    "put_if_absent": (lambda s: s.put("k", CONTENT, only_if_absent=True), "PUT"),
    "stat": (lambda s: s.stat("k"), "List"),
    "list": (lambda s: list(s.list("k")), "List"),
    "list_folders": (lambda s: list(s.list_folders()), "List"),
    "delete": (lambda s: s.delete(["k"]), "Delete"),
    "put_file": (lambda s: sent(s, lambda b: s.put_file("k", b)), "PUT"),
    "copy": (lambda s: s.copy("k", "target", etag=ETAG), "Copy"),
    "begin_upload": (lambda s: s.begin_upload("k"), "Create"),
    "upload_part": (lambda s: sent(s, lambda b: s.upload_part("k", "u", 1, b)), "UploadPart"),
    "complete_upload": (lambda s: s.complete_upload("k", "u", ONE_PART, crc64nvme=checksum(CONTENT)), "Complete"),
    "abort_upload": (lambda s: s.abort_upload("k", "u"), "Abort"),
    "pending_uploads": (lambda s: list(s.pending_uploads("")), "ListUploads"),
    "list_parts": (lambda s: list(s.list_parts("k", "u")), "ListParts"),
    "read": (lambda s: read_all(s, "k"), "GET"),
    "read_range": (lambda s: read_all(s, "k", offset=3, length=4), "GET"),
    "read_beginning": (lambda s: read_all(s, "k", length=4), "GET"),
    "read_known": (lambda s: read_all(s, "k", length=7, etag=ETAG), "GET"),
    "probe": (lambda s: probe(s, "auto"), "List"),
}


def chunked(content: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (1, content[n : n + 1]) for n in range(len(content))) + b"0\r\n\r\n"


def interim_for_ever() -> Iterator[bytes]:
    return itertools.repeat(head("102 Processing") * 100)


def trailers_for_ever() -> Iterator[bytes]:
    yield head("200 OK", "Transfer-Encoding: chunked", f'ETag: "{ETAG}"') + b"0\r\n"
    yield from itertools.repeat(b"X-Trailer: more\r\n" * 100)


STATUSES = (201, 202, 203, 206, 301, 302, 304, 307, 400, 401, 403, 404, 407, 408, 409, 410, 412, 416, 418, 429)
BY_STATUS = {
    f"{status} {kind}": whole(f"{status} Something", content, *fields)
    for status in (*STATUSES, 500, 501, 502, 503, 504, 599, 999)
    for kind, content, fields in [
        ("bare", b"", ()),
        ("page", PAGE, (HTML, NGINX)),
        ("json", JSON, (IS_JSON,)),
        ("location", PAGE, (HTML, "Location: https://user:hunter2@elsewhere.test/path?X-Amz-Signature=hunter2")),
    ]
    if status != 304 or not content
}
RARE = [name for name in BY_STATUS if name.split()[0] not in ("301", "403", "404", "503")]
"""Whose status proxies and portals seldom give."""
NOT_OF_S3: dict[str, bytes | Callable[[], Iterable[bytes]]] = BY_STATUS | {
    "200 empty": whole("200 OK"),
    "200 page": whole("200 OK", PAGE, HTML),
    "200 page with an etag": whole("200 OK", PAGE, HTML, NGINX),
    "200 page that is no XML": whole("200 OK", b"<p>Welcome<br></p><img>", HTML, NGINX),
    "200 JSON": whole("200 OK", JSON, IS_JSON),
    "200 JSON of express": whole("200 OK", JSON, IS_JSON, 'ETag: W/"36-x"'),
    "200 page in chunks": head("200 OK", HTML, "Transfer-Encoding: chunked") + chunked(PAGE),
    "200 page until the end": head("200 OK", HTML) + PAGE,
    "200 page compressed": whole("200 OK", gzip.compress(PAGE), HTML, "Content-Encoding: gzip"),
    "404 page compressed": whole("404 Not Found", gzip.compress(PAGE), HTML, "Content-Encoding: gzip"),
    "404 of S3, cut off": head("404 Not Found", "Content-Length: 60") + b"<Error><Code>NoSuchKey</Code><Mess",
    "404 of S3, cut off, until the end": head("404 Not Found") + b"<Error><Code>NoSuchKey</Code><Mess",
    "404 of S3, cut off, in chunks": head("404 Not Found", "Transfer-Encoding: chunked")
    + b"22\r\n<Error><Code>NoSuchKey</Code>",
    "412 in a page": whole("412 Failed", b"<html><Error><Code>PreconditionFailed</Code></Error></html>"),
    "404 with a number": error("404 Not Found", "404"),
    "404 without a code": document("<Error><Message>no</Message></Error>", status="404 Not Found"),
    "404 and no end of it": lambda: itertools.chain([head("404 Not Found")], itertools.repeat(b"x" * 65_536)),
    "101": head("101 Switching Protocols", "Upgrade: websocket"),
    "1xx and then 404": head("100 Continue") * 3 + whole("404 Not Found", PAGE, HTML),
    "1xx for ever": interim_for_ever,
    "trailers for ever": trailers_for_ever,
    "a head for ever": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"X-A: b\r\n" * 500)),
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
    "half a head": b"HTTP/1.1 404 Not Found\r\nContent-",
}


def reframed(answer: bytes, *fields: str, content: bytes | None = None) -> bytes:
    """Return an answer of S3 with another length of its body, or what is said instead of one."""
    first, _, after = answer.partition(b"\r\n")
    kept, _, was = after.partition(b"\r\n\r\n")
    lines = [line for line in kept.split(b"\r\n") if line and not line.lower().startswith(b"content-length")]
    return b"\r\n".join([first, *lines, *(f.encode() for f in fields), b"", b""]) + (was if content is None else content)


def content_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


BADLY_FRAMED: dict[str, Callable[[bytes], bytes]] = {
    text: lambda raw, text=text: reframed(raw, f"Content-Length: {text}")  # type: ignore[misc]
    for text in ("-1", "+7", "seven", "7.0", "0x7", "7, 8", "9" * 19, "9" * 5000, "\xb2", "")
} | {
    "two lengths": lambda raw: reframed(raw, "Content-Length: 7", "Content-Length: 8"),
    "cut off": lambda raw: reframed(raw, "Content-Length: 100000"),
    "cut off in chunks": lambda raw: reframed(raw, "Transfer-Encoding: chunked", content=b"fff\r\n<a>"),
    "not in chunks": lambda raw: reframed(raw, "Transfer-Encoding: chunked", content=b"<a>not a size</a>"),
    "compressed on the way": lambda raw: reframed(raw, "Transfer-Encoding: gzip, chunked"),
}
HAS_NO_LENGTH = "abort_upload"
"""204 has no body."""
