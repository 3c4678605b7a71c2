"""Listings of a bucket, page by page. botocore's parser takes longer for an object's date than the object took to be sent."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from botocore.parsers import ResponseParserError

from sidecar.store.protocol import Stored
from sidecar.store.s3_xml import children, name_of, texts

NO_MORE = ""
_OF_PAGE = frozenset({"EncodingType", "IsTruncated", "NextContinuationToken"})


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a listing. Keys are whole, as the bucket has them; ``next_token`` is empty at the end."""

    objects: list[Stored]
    prefixes: list[str]
    next_token: str


def pages(ask: Callable[[dict[str, str]], bytes], *, prefix: str, delimiter: str = "") -> Iterator[Page]:
    """Ask for one page after another.

    Args:
        ask: Sends a query to the bucket and returns the answer's body.
        prefix: Of the keys.
        delimiter: Keys that have it behind the prefix are listed once, up to it.

    Source: S3 API reference, "ListObjectsV2".
    """
    query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"} | ({"delimiter": delimiter} if delimiter else {})
    while True:
        page = read_page(ask(query))
        yield page
        if page.next_token == NO_MORE:
            return
        query = query | {"continuation-token": page.next_token}


def read_page(raw: bytes) -> Page:
    """Return what a page says.

    Raises:
        ResponseParserError: It is no listing, as botocore says it.
    """
    said: dict[str, str] = {}
    objects, prefixes, last = [], [], None
    try:
        # Bit by bit: some stores list ten thousand objects in one page, and a tree of them takes tens of megabytes.
        for _, last in ElementTree.iterparse(io.BytesIO(raw)):  # noqa: S314 - expat expands no external entities
            if (name := name_of(last)) == "Contents":
                objects.append(_stored(texts(last)))
                last.clear()
            elif name == "CommonPrefixes":
                prefixes += [part.text or "" for part in children(last, "Prefix")]
                last.clear()
            elif name in _OF_PAGE:
                said[name] = last.text or ""
    except ElementTree.ParseError as error:
        raise ResponseParserError(f"no listing: {error}") from None
    if last is None or name_of(last) != "ListBucketResult":
        raise ResponseParserError(f"no listing: <{name_of(last)[:50] if last is not None else ''}>")
    if said.get("EncodingType") == "url":
        objects = [replace(found, key=unquote_plus(found.key)) for found in objects]
        prefixes = [unquote_plus(prefix) for prefix in prefixes]
    return Page(objects, prefixes, said.get("NextContinuationToken", NO_MORE) if said.get("IsTruncated") == "true" else NO_MORE)


def _stored(told: dict[str, str]) -> Stored:
    try:
        return Stored(told["Key"], int(told["Size"]), told.get("ETag", "").strip('"'))
    except (KeyError, ValueError) as error:
        raise ResponseParserError(f"no listing: an object with {error}") from None
