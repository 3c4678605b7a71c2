"""Paginated listings of a bucket. Own parser: botocore spends more time on an object's date than on sending a small object."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from botocore.parsers import ResponseParserError

from sidecar.store.protocol import Stored
from sidecar.store.s3.xml import IncompleteDocument, children, name_of, no_document, number, texts

NO_MORE = ""
_OF_PAGE = frozenset({"EncodingType", "IsTruncated", "NextContinuationToken"})


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. Keys include the store's prefix; ``next_token`` is empty on the last page."""

    objects: list[Stored]
    prefixes: list[str]
    next_token: str


def pages(
    ask: Callable[[dict[str, str]], bytes], *, prefix: str, delimiter: str = "", most: int | None = None
) -> Iterator[Page]:
    """Yield the pages of a listing.

    Args:
        ask: Sends a query to the bucket and returns the answer's body.
        prefix: Common prefix of the keys.
        delimiter: Keys that contain it after the prefix are grouped by the part up to it.
        most: Maximum number of objects in a page; ``None``: the store's own maximum.

    Raises:
        ResponseParserError: As ``read_page``.
        IncompleteDocument: A truncated page has no continuation token, a token comes twice, or a page lists keys outside of
            ``prefix``.

    Source: S3 API reference, "ListObjectsV2".
    """
    asked: set[str] = set()
    query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"} | ({"delimiter": delimiter} if delimiter else {})
    query |= {} if most is None else {"max-keys": str(most)}
    while True:
        page = read_page(ask(query))
        if not all(key.startswith(prefix) for key in (*(found.key for found in page.objects), *page.prefixes)):
            raise IncompleteDocument("ListObjectsV2: the listing of another prefix")  # from a cache that ignores the query
        yield page
        if page.next_token == NO_MORE:
            return
        if page.next_token in asked:
            raise IncompleteDocument("ListObjectsV2: the same page again")
        asked.add(page.next_token)
        query = query | {"continuation-token": page.next_token}


def read_page(raw: bytes) -> Page:
    """Parse a page.

    Raises:
        IncompleteDocument: It is truncated, or announces more objects without a continuation token.
        ResponseParserError: It is not a listing.
    """
    page: dict[str, str] = {}
    objects, prefixes, last = [], [], None
    try:
        # Incrementally: some stores list ten thousand objects in one page, and a tree of them takes tens of megabytes.
        for _, last in ElementTree.iterparse(io.BytesIO(raw)):  # noqa: S314 - expat expands no external entities
            if (name := name_of(last)) == "Contents":
                objects.append(_stored(texts(last)))
                last.clear()
            elif name == "CommonPrefixes":
                prefixes += [part.text or "" for part in children(last, "Prefix")]
                last.clear()
            elif name in _OF_PAGE:
                page[name] = last.text or ""
    except ElementTree.ParseError as error:
        raise no_document(raw, ["ListBucketResult"], str(error)) from None
    if last is None or name_of(last) != "ListBucketResult":
        raise ResponseParserError(f"no listing: <{name_of(last)[:50] if last is not None else ''}>")
    if page.get("EncodingType") == "url":
        objects = [replace(found, key=unquote_plus(found.key)) for found in objects]
        prefixes = [unquote_plus(prefix) for prefix in prefixes]
    if page.get("IsTruncated", "").lower() != "true":
        return Page(objects, prefixes, NO_MORE)
    token = page.get("NextContinuationToken", NO_MORE)
    if token == NO_MORE:  # objects missing from a listing count as deleted
        raise IncompleteDocument("ListObjectsV2: IsTruncated without NextContinuationToken")
    return Page(objects, prefixes, token)


def _stored(fields: dict[str, str]) -> Stored:
    try:
        return Stored(fields["Key"], number(fields["Size"]), fields.get("ETag", "").strip('"'), fields.get("LastModified", ""))
    except (KeyError, ValueError) as error:
        raise ResponseParserError(f"no listing: an object with {error}") from None
