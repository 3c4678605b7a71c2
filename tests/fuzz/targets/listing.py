"""XML answers of S3 on the control plane: aiobotocore's client and parser, with our checks before and after them.

Nothing but the transport is left out. A listing is what the document holds, or an error of the store; none is shortened.
"""

from __future__ import annotations

import functools
import tempfile
import urllib.parse
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from aiobotocore.awsrequest import AioAWSResponse
from botocore.compat import HTTPHeaders

from sidecar.errors import StoreError
from sidecar.store.s3.store import S3Options, S3Store
from tests.fuzz.target import check_text
from tests.servers import write_credentials

INSTRUMENTED = ("sidecar.store.s3.answers", "sidecar.store.s3.control", "sidecar.store.s3.errors")
WORDS = (
    *(
        b"<?xml version='1.0'?>",
        b"<ListBucketResult>",
        b"</ListBucketResult>",
        b"<Contents>",
        b"</Contents>",
        b"<Key>run/",
        b"</Key>",
    ),
    *(b"<Size>", b"-1", b"1e3", b"<IsTruncated>true</IsTruncated>", b"<NextContinuationToken>t</NextContinuationToken>"),
    *(b"<EncodingType>url</EncodingType>", b"%00", b"%", b"&lt;", b"&#0;", b"&#xD800;", b"<![CDATA[", b"]]>", b"<!--", b"-->"),
    *(
        b"<!DOCTYPE a [<!ENTITY b 'c'>]>",
        b"&b;",
        b"<Error>",
        b"<Code>NoSuchKey</Code>",
        b"xmlns:a='b'",
        b"a:",
        b"<Part>",
        b"<Upload>",
    ),
    *(b"<PartNumber>", b"<Initiated>", b"<ETag>&quot;e&quot;</ETag>", b"<Message>", b"<CommonPrefixes>", b"<Prefix>run/"),
)
MOST_BYTES = 2048
KEY = "checkpoint-20/a"
Listing = Callable[[S3Store], list[Any]]
LISTINGS: tuple[tuple[str, str, Listing], ...] = (
    ("Contents", "Key", lambda store: [f"run/{stored.key}" for stored in store.list("")]),
    ("CommonPrefixes", "Prefix", lambda store: [f"run/{folder}/" for folder in store.list_folders()]),
    ("Upload", "Key", lambda store: [upload.key for upload in store.pending_uploads("")]),
    ("Part", "PartNumber", lambda store: [part.number for part in store.list_parts(KEY, "u")]),
)
OTHERS: tuple[Callable[[S3Store], Any], ...] = (
    lambda store: store.stat(KEY),
    lambda store: store.begin_upload(KEY),
    lambda store: store.delete([KEY]),
)


class Answers:
    """The answer to every request of the store."""

    def __init__(self) -> None:
        self.status = 200
        self.content = b""
        folder = write_credentials(Path(tempfile.mkdtemp(prefix="fuzz-")))
        options = S3Options(bucket="b", prefix="run", endpoint_url="http://127.0.0.1:9", credentials_dir=folder)
        self.store = S3Store(options)
        self.store._clients.current().client.meta.events.register("before-send.s3", self._answer)

    def _answer(self, request: Any, **_: Any) -> AioAWSResponse:
        headers = HTTPHeaders()
        headers["Content-Type"] = "application/xml"
        answer = AioAWSResponse(request.url, self.status, headers, None)
        answer._content = self.content
        return answer


@functools.cache
def answers() -> Answers:
    return Answers()


def check(raw: bytes) -> None:
    given = answers()
    given.content, given.status = raw, 200
    for element, name, listing in LISTINGS:
        if (found := _outcome(given, listing)) is not None:
            assert len(found) <= _count(raw, element, name), f"{found} of {element}"
    chance = zlib.crc32(raw)  # one of them: each request costs two milliseconds
    _outcome(given, OTHERS[chance % len(OTHERS)])
    given.status = (404, 412, 503)[chance // 7 % 3]
    found = _outcome(given, LISTINGS[0][2] if chance % 2 else OTHERS[0])
    assert found is None, f"an answer with status {given.status} is no listing: {found}"


def _outcome(given: Answers, call: Callable[[S3Store], Any]) -> Any:
    try:
        return call(given.store)
    except StoreError as error:
        check_text(error)
        return None


def _count(raw: bytes, element: str, name: str) -> int:
    """Count the elements of a listing with another parser."""
    root = ElementTree.fromstring(raw.strip())
    found = [child for child in root if child.tag.rpartition("}")[2].rpartition(":")[2] == element]
    assert all(urllib.parse.unquote(each.findtext(f"{{*}}{name}") or each.findtext(name) or "x") for each in found)
    return len(found)
