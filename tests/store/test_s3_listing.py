"""Listings as S3 writes them, in as many pages as it likes."""

from __future__ import annotations

import itertools
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from botocore.parsers import ResponseParserError
from hypothesis import given
from hypothesis import strategies as st

from sidecar.store.protocol import Stored
from sidecar.store.s3.listing import Page, pages, read_page
from sidecar.store.s3.xml import IncompleteDocument

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).map("p/".__add__)
NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def written(objects: list[Stored], prefixes: list[str], token: str, *, namespace: str) -> bytes:
    """Write a page as S3 does when it is asked to encode keys as in URLs."""
    contents = "".join(
        f"<Contents><Key>{quote_plus(o.key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{o.etag}&quot;</ETag><Size>{o.size_bytes}</Size><Owner><ID>x</ID></Owner></Contents>"
        for o in objects
    )
    common = "".join(f"<CommonPrefixes><Prefix>{quote_plus(p)}</Prefix></CommonPrefixes>" for p in prefixes)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{escape(token)}</NextContinuationToken>"
    return (
        f"<?xml version='1.0'?><ListBucketResult{namespace}><Name>b</Name><Prefix>p</Prefix><EncodingType>url</EncodingType>"
        f"{more if token else '<IsTruncated>false</IsTruncated>'}{contents}{common}</ListBucketResult>"
    ).encode()


PAGES = st.builds(
    Page,
    st.lists(st.builds(Stored, KEYS, st.integers(0, 1 << 50), st.from_regex(r"\A[0-9a-f]{32}(-[0-9]+)?\Z")), max_size=4),
    st.lists(KEYS, max_size=3),
    st.just("more/+=<"),
)


@given(st.lists(PAGES, min_size=1, max_size=4), st.sampled_from(["", NAMESPACE]))
def test_all_pages_are_read_as_they_were_written(written_pages: list[Page], namespace: str) -> None:
    last = len(written_pages) - 1
    answers = [
        written(page.objects, page.prefixes, f"{number} {page.next_token}" if number < last else "", namespace=namespace)
        for number, page in enumerate(written_pages)
    ]
    asked: list[dict[str, str]] = []

    def ask(query: dict[str, str]) -> bytes:
        asked.append(query)
        return answers[len(asked) - 1]

    got = list(pages(ask, prefix="p/", delimiter="/"))
    assert [(page.objects, page.prefixes) for page in got] == [(page.objects, page.prefixes) for page in written_pages]
    assert ["continuation-token" in query for query in asked] == [False] + [True] * last
    assert {(query["prefix"], query["delimiter"]) for query in asked} == {("p/", "/")}


def test_keys_of_a_store_that_does_not_encode_are_taken_as_they_are() -> None:
    raw = b"<ListBucketResult><Contents><Key>a+b%20c</Key><Size>1</Size><ETag>e</ETag></Contents></ListBucketResult>"
    assert read_page(raw) == Page([Stored("a+b%20c", 1, "e")], [], "")


@pytest.mark.parametrize(
    "raw",
    [
        b"<html><body>welcome</body></html>",
        b"<ListBucketResult><Contents><Key>a</Key></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Key>a</Key><Size>large</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Key>a</Key><Size>-1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult>",
    ],
)
def test_what_is_no_listing_is_refused(raw: bytes) -> None:
    with pytest.raises(ResponseParserError):
        read_page(raw)


@pytest.mark.parametrize("raw", [b"", b" \n", b"<?xml version='1.0'?><ListBucketResult><Contents><Key>a</K"])
def test_a_listing_that_is_cut_off_is_asked_for_again(raw: bytes) -> None:
    with pytest.raises(IncompleteDocument):
        read_page(raw)


def test_a_page_that_says_there_is_more_and_not_where_is_an_error_and_not_the_end() -> None:
    raw = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    with pytest.raises(IncompleteDocument, match="IsTruncated without"):
        read_page(raw)


@pytest.mark.parametrize("tokens", [["a"], ["a", "b", "c"]])
def test_tokens_that_go_round_in_a_circle_are_an_error(tokens: list[str]) -> None:
    answers = itertools.cycle([written([], [], token, namespace="") for token in tokens])
    with pytest.raises(IncompleteDocument, match="the same page again"):
        list(pages(lambda _: next(answers), prefix="p/"))


@given(st.binary(max_size=100))
def test_any_bytes_are_a_page_or_one_error(raw: bytes) -> None:
    try:
        read_page(raw)
    except ResponseParserError:
        return
