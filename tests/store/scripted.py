"""An S3 server of which every answer is given in bytes: what stands on the way to a store may say anything."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

ETAG = "9a0364b9e99bb480dd25e1f0284c8555"
CONTENT = b"content"
"""Of each object; its MD5 is ``ETAG``."""
JOINED = "73ad9750e8d5fcf7936433620b4baa21-1"
"""Etag of an object that is made of one part."""
ROOT = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def operation(self) -> str:
        if "uploadId" in self.query:
            part = "UploadPartCopy" if "x-amz-copy-source" in self.headers else "UploadPart"
            return {"PUT": part, "POST": "Complete", "DELETE": "Abort", "GET": "ListParts"}[self.method]
        if "uploads" in self.query:
            return "Create" if self.method == "POST" else "ListUploads"
        if "list-type" in self.query:
            return "List"
        if "delete" in self.query:
            return "Delete"
        return "Copy" if "x-amz-copy-source" in self.headers else self.method


Script = Callable[[Asked], bytes | Iterable[bytes]]


def head(status: str, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode("latin-1")


def whole(status: str, content: bytes = b"", *fields: str) -> bytes:
    return head(status, f"Content-Length: {len(content)}", *fields) + content


def document(content: str, *, status: str = "200 OK") -> bytes:
    return whole(status, f"<?xml version='1.0'?>{content}".encode(), "Content-Type: application/xml")


def error(status: str, code: str) -> bytes:
    return document(f"<Error><Code>{code}</Code><Message>no</Message></Error>", status=status)


def s3(asked: Asked) -> bytes:
    """Answer as S3 does, where every object exists and holds ``CONTENT``, and each upload has one part of it."""
    etag, key = f'ETag: "{ETAG}"', unquote(asked.query.get("prefix", ""))
    listed = f"<Size>{len(CONTENT)}</Size><ETag>&quot;{ETAG}&quot;</ETag>"
    told = f"<ETag>&quot;{ETAG}&quot;</ETag>"
    match asked.operation:
        case "PUT" | "UploadPart":
            return whole("200 OK", b"", etag)
        case "GET" if "range" in asked.headers:
            first, last = (int(n) for n in asked.headers["range"].removeprefix("bytes=").split("-"))
            sent = CONTENT[first : last + 1]
            place = f"Content-Range: bytes {first}-{first + len(sent) - 1}/{len(CONTENT)}"
            return whole("206 Partial Content", sent, etag, place)
        case "GET":
            return whole("200 OK", CONTENT, etag)
        case "List":
            inner = f"<Contents><Key>{key}</Key>{listed}</Contents><CommonPrefixes><Prefix>{key}a/</Prefix></CommonPrefixes>"
            return document(f"<ListBucketResult {ROOT}>{inner}</ListBucketResult>")
        case "Delete":
            return document(f"<DeleteResult {ROOT}/>")
        case "Copy":
            return document(f"<CopyObjectResult {ROOT}>{told}</CopyObjectResult>")
        case "UploadPartCopy":
            return document(f"<CopyPartResult {ROOT}>{told}</CopyPartResult>")
        case "Create":
            return document(f"<InitiateMultipartUploadResult {ROOT}><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        case "Complete":
            joined = f"<ETag>&quot;{JOINED}&quot;</ETag>"
            return document(f"<CompleteMultipartUploadResult {ROOT}>{joined}</CompleteMultipartUploadResult>")
        case "Abort":
            return head("204 No Content")
        case "ListUploads":
            inner = "<Upload><Key>run/k</Key><UploadId>u</UploadId></Upload>"
            return document(f"<ListMultipartUploadsResult {ROOT}>{inner}</ListMultipartUploadsResult>")
        case "ListParts":
            return document(f"<ListPartsResult {ROOT}><Part><PartNumber>1</PartNumber>{listed}</Part></ListPartsResult>")
    raise AssertionError(asked)


@contextlib.contextmanager
def answering(script: Script, asked: list[Asked] | None = None) -> Iterator[str]:
    """Yield the endpoint of a server that answers each request with these bytes and closes the connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        threads: list[threading.Thread] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    thread = threading.Thread(target=_serve, args=(listening.accept()[0], script, asked))
                    thread.start()
                    threads.append(thread)

        acceptor = threading.Thread(target=serve)
        acceptor.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()


def _serve(connection: socket.socket, script: Script, log: list[Asked] | None) -> None:
    with connection, contextlib.suppress(OSError):
        asked = _request(connection)
        if asked is None:
            return
        if log is not None:
            log.append(asked)
        answer = script(asked)
        for piece in [answer] if isinstance(answer, bytes) else answer:
            connection.sendall(piece)


def _request(connection: socket.socket) -> Asked | None:
    received = b""
    while b"\r\n\r\n" not in received:
        if not (more := connection.recv(65_536)):
            return None
        received += more
    lines, _, body = received.partition(b"\r\n\r\n")
    first, *fields = lines.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    left = int(headers.get("content-length", 0)) - len(body)
    while left > 0:
        left -= len(connection.recv(65_536))
    method, target, _ = first.split(" ")
    parts = urlsplit(target)
    query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    return Asked(method, parts.path, query, headers)
