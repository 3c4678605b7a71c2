"""S3 servers that are less than S3: made of one that is, by what the proxy refuses, leaves out or says differently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.proxy import Dialect
from tests.faults.wire import Head, Request

_ETAG_IN_XML = re.compile(rb"(?<=ETag>)(?P<quote>\"|&quot;|&#34;)?(?P<digits>[0-9a-f]{32})")
_ETAG_IN_HEADER = re.compile(r"(?P<digits>[0-9a-f]{32})")
_CHECKSUMS = re.compile(r"x-amz-(checksum-|sdk-checksum|trailer)")
_CONDITIONS = ("if-none-match", "if-match")


def _other(digits: str) -> str:
    return digits[::-1]


def _in_xml(blocks: Iterator[bytes]) -> Iterator[bytes]:
    def other(found: re.Match[bytes]) -> bytes:
        return (found["quote"] or b"") + _other(found["digits"].decode()).encode()

    yield _ETAG_IN_XML.sub(other, b"".join(blocks))


def _in_headers(head: Head) -> Head:
    def other(value: str) -> str:
        return _ETAG_IN_HEADER.sub(lambda found: _other(found["digits"]), value)

    return Head(
        head.first, [(name, other(value) if name.lower() in ("etag", *_CONDITIONS) else value) for name, value in head.headers]
    )


class OpaqueEtags(Dialect):
    """Etags that look like MD5s and are not, as those of encrypted objects: each is read backwards."""

    def request(self, head: Head) -> Head:
        return _in_headers(head)

    def request_body(self, request: Request, blocks: Iterator[bytes]) -> Iterator[bytes]:
        return _in_xml(blocks) if request.operation == "CompleteMultipartUpload" else blocks

    def answer(self, head: Head) -> Head:
        return _in_headers(head)

    def answer_body(self, head: Head, blocks: Iterator[bytes]) -> Iterator[bytes]:
        return _in_xml(blocks) if "xml" in head.get("content-type") else blocks


@dataclass
class NoChecksums(OpaqueEtags):
    """Takes no checksum of any sort, and gives none in its etags."""

    status: int
    code: str

    def refusal(self, request: Request) -> tuple[int, str] | None:
        if any(_CHECKSUMS.match(name.lower()) for name, _ in request.headers):
            return self.status, self.code
        return None


class ConditionsRefused(Dialect):
    """Answers 501 to a conditional write."""

    def refusal(self, request: Request) -> tuple[int, str] | None:
        return (501, "NotImplemented") if request.method == "PUT" and request.get("if-none-match") else None


class ConditionsIgnored(Dialect):
    """Writes whatever the condition."""

    def request(self, head: Head) -> Head:
        return head.without("if-none-match")
