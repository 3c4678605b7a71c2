"""What is said about multipart uploads, as S3 says it and as servers that differ from it do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from urllib.parse import quote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from hypothesis import given
from hypothesis import strategies as st

from sidecar.store.http.wire import Answer
from sidecar.store.protocol import Part, PendingUpload
from sidecar.store.s3.multipart import Multipart
from sidecar.store.s3.requests import S3Requests
from sidecar.store.s3.xml import IncompleteDocument
from tests.store.test_s3_listing import KEYS, NAMESPACE

DECLARATION = b'<?xml version="1.0" encoding="UTF-8"?>\n'
BEGUN_AT = "1970-01-01T00:01:00.000Z"
ETAGS = st.from_regex(r"\A[0-9a-f]{32}\Z")
PARTS = st.lists(st.builds(Part, st.integers(1, 10_000), st.integers(0, 5 << 30), ETAGS), max_size=4)
UPLOADS = st.lists(st.builds(PendingUpload, KEYS, st.from_regex(r"\A[\w.~-]{1,20}\Z")), max_size=4)


class Answers:
    """What a bucket answers, one after another, in place of the wire."""

    def __init__(self, *contents: bytes) -> None:
        self._contents = list(contents)
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.sent: list[bytes | None] = []

    def ask(self, method: str, key: str, **asked: Any) -> Answer:
        self.asked.append((method, key, dict(asked.get("query", {}))))
        self.sent.append(asked.get("content"))
        return Answer(200, dict(asked.get("headers", {})), self._contents.pop(0))


def multipart(*contents: bytes) -> tuple[Multipart, Answers]:
    answers = Answers(*contents)
    return Multipart(cast("S3Requests", answers)), answers


def page(root: str, inner: str, **told: Any) -> bytes:
    said = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in told.items())
    return DECLARATION + f"<{root}{NAMESPACE}>{said}{inner}</{root}>".encode()


@pytest.mark.parametrize("namespace", ["", NAMESPACE])
def test_an_upload_begins_with_its_id(namespace: str) -> None:
    begun, answers = multipart(
        f"<InitiateMultipartUploadResult{namespace}><UploadId>2~a</UploadId></InitiateMultipartUploadResult>".encode()
    )
    assert begun.begin("k", headers={}) == "2~a"
    assert answers.asked == [("POST", "k", {"uploads": ""})]
    assert answers.sent == [b""], "a length is needed, of nothing"


@pytest.mark.parametrize("content", [b"", b"<html/>", b"no XML", b"<InitiateMultipartUploadResult/>"])
def test_an_upload_without_an_id_was_not_begun(content: bytes) -> None:
    with pytest.raises(ResponseParserError):
        multipart(content)[0].begin("k", headers={})


@given(PARTS)
def test_parts_are_joined_as_they_are_named(parts: list[Part]) -> None:
    joined, answers = multipart(page("CompleteMultipartUploadResult", "", ETag='"abc-2"'))
    assert joined.complete("k", "u", parts, headers={}).strip('"') == "abc-2"
    assert answers.sent[0] is not None
    named = [[part.text for part in listed] for listed in ElementTree.fromstring(answers.sent[0])]
    assert named == [[f'"{part.etag}"', str(part.number)] for part in parts]


def test_a_store_that_does_not_say_the_etag_has_joined_them_all_the_same() -> None:
    assert multipart(page("CompleteMultipartUploadResult", ""))[0].complete("k", "u", [], headers={}) == ""


@pytest.mark.parametrize("content", [b"", b"  \n", b"<CompleteMultipartUploadResult><ETag>e</ET"])
def test_an_answer_that_is_empty_or_cut_off_has_not_joined_anything(content: bytes) -> None:
    with pytest.raises(IncompleteDocument):
        multipart(content)[0].complete("k", "u", [], headers={})


@pytest.mark.parametrize("root", ["ListPartsResult", "ListMultipartUploadsResult"])
def test_a_page_that_says_there_is_more_and_not_where_is_an_error_and_not_the_end(root: str) -> None:
    asked, _ = multipart(page(root, "", IsTruncated="true"))
    with pytest.raises(IncompleteDocument, match="IsTruncated without"):
        list(asked.parts("k", "u") if root == "ListPartsResult" else asked.pending("p/"))


def test_markers_that_go_round_in_a_circle_are_an_error() -> None:
    pages = [page("ListPartsResult", "", IsTruncated="true", NextPartNumberMarker=n) for n in (1, 2, 3, 1)]
    with pytest.raises(IncompleteDocument, match="the same page again"):
        list(multipart(*pages)[0].parts("k", "u"))


@pytest.mark.parametrize("before", [b"", b"   \n \n"], ids=["at-once", "after-spaces"])
def test_an_error_with_status_200_is_an_error(before: bytes) -> None:
    said = before + DECLARATION + b"<Error><Code>InternalError</Code><Message>again</Message></Error>"
    with pytest.raises(ClientError) as raised:
        multipart(said)[0].complete("k", "u", [], headers={})
    assert raised.value.response["Error"] == {"Code": "InternalError", "Message": "again"}


@given(st.lists(UPLOADS, min_size=1, max_size=3), st.booleans())
def test_all_pages_of_unfinished_uploads_are_read(listed: list[list[PendingUpload]], is_quoted: bool) -> None:
    if not is_quoted:  # not all that a key may hold can be written in XML
        listed = [[replace(u, key="".join(filter(str.isalnum, u.key))) for u in uploads] for uploads in listed]
    quoted = quote_plus if is_quoted else str
    pages = []
    for number, uploads in enumerate(listed):
        inner = "".join(
            f"<Upload><Key>{quoted(u.key)}</Key><UploadId>{u.upload_id}</UploadId><Initiated>{BEGUN_AT}</Initiated></Upload>"
            for u in uploads
        )
        told = {"EncodingType": "url"} if is_quoted else {}
        if number < len(listed) - 1:
            told |= {"IsTruncated": "true", "NextKeyMarker": quoted(f"a b+{number}"), "NextUploadIdMarker": f"id+{number}"}
        pages.append(page("ListMultipartUploadsResult", inner, **told))
    asked, answers = multipart(*pages)
    got = list(asked.pending("p/"))
    assert got == [upload for uploads in listed for upload in uploads]
    assert {upload.begun_at_s for upload in got} <= {60.0}
    markers = [(query.get("key-marker"), query.get("upload-id-marker")) for _, _, query in answers.asked]
    assert markers == [(None, None), *((f"a b+{n}", f"id+{n}") for n in range(len(listed) - 1))]


@given(st.lists(PARTS, min_size=1, max_size=3))
def test_all_pages_of_parts_are_read(listed: list[list[Part]]) -> None:
    pages = []
    for number, parts in enumerate(listed):
        inner = "".join(
            f"<Part><PartNumber>{p.number}</PartNumber><Size>{p.size_bytes}</Size><ETag>&quot;{p.etag}&quot;</ETag></Part>"
            for p in parts
        )
        told = {"IsTruncated": "true", "NextPartNumberMarker": 1000 + number} if number < len(listed) - 1 else {}
        pages.append(page("ListPartsResult", inner, **told))
    asked, answers = multipart(*pages)
    assert list(asked.parts("k", "u")) == [part for parts in listed for part in parts]
    markers = [query.get("part-number-marker") for _, _, query in answers.asked]
    assert markers == [None, *(str(1000 + n) for n in range(len(listed) - 1))]


def test_a_store_that_gives_the_same_page_again_is_not_asked_for_ever() -> None:
    same = page("ListPartsResult", "", IsTruncated="true", NextPartNumberMarker=1)
    with pytest.raises(ResponseParserError, match="the same page again"):
        list(multipart(same, same)[0].parts("k", "u"))


@pytest.mark.parametrize("inner", ["<Part/>", "<Part><PartNumber>one</PartNumber><Size>1</Size><ETag>e</ETag></Part>"])
def test_a_part_that_is_not_told_is_not_guessed(inner: str) -> None:
    with pytest.raises(ResponseParserError):
        list(multipart(page("ListPartsResult", inner))[0].parts("k", "u"))
