"""Listings of a bucket, page by page. botocore's parser takes longer for an object's date than the object took to be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from botocore.parsers import ResponseParserError

from sidecar.store.protocol import Stored

NO_MORE = ""


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
    try:
        root = ElementTree.fromstring(raw)  # noqa: S314 - expat expands no external entities
    except ElementTree.ParseError as error:
        raise ResponseParserError(f"no listing: {error}") from None
    if _name(root) != "ListBucketResult":
        raise ResponseParserError(f"no listing: <{_name(root)[:50]}>")
    said = {_name(child): child.text or "" for child in root}
    decoded = unquote_plus if said.get("EncodingType") == "url" else str
    objects, prefixes = [], []
    for child in root:
        if (name := _name(child)) == "Contents":
            told = {_name(part): part.text or "" for part in child}
            objects.append(_stored(told, decoded))
        elif name == "CommonPrefixes":
            prefixes += [decoded(part.text or "") for part in child if _name(part) == "Prefix"]
    is_truncated = said.get("IsTruncated") == "true"
    return Page(objects, prefixes, said.get("NextContinuationToken", NO_MORE) if is_truncated else NO_MORE)


def _stored(told: dict[str, str], decoded: Callable[[str], str]) -> Stored:
    try:
        return Stored(decoded(told["Key"]), int(told["Size"]), told.get("ETag", "").strip('"'))
    except (KeyError, ValueError) as error:
        raise ResponseParserError(f"no listing: an object with {error}") from None


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]  # without the namespace
