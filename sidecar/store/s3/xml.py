"""Parser of S3's XML answers. Namespaces are ignored: some stores leave them out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from botocore.parsers import ResponseParserError

MAX_NUMBER_DIGITS = 18


class IncompleteDocument(ResponseParserError):
    """An answer of S3 that is truncated, contradictory or lacks a required element. The request is retried."""


def name_of(element: ElementTree.Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def texts(element: ElementTree.Element) -> dict[str, str]:
    """Return the texts of an element's children by name; of several with one name, the last."""
    return {name_of(part): part.text or "" for part in element}


def children(element: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    """Yield an element's children with this name."""
    return (part for part in element if name_of(part) == name)


def number(text: str) -> int:
    """Return a count or size as S3 writes it.

    Raises:
        ValueError: The text is not a number of up to ``MAX_NUMBER_DIGITS`` digits; signs and separators are not allowed.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_NUMBER_DIGITS:
        raise ValueError(f"the number {text[:30]!r}")
    return int(text)


def parsed(raw: bytes, *beginnings: str) -> ElementTree.Element:
    """Parse a document and return its root, whose name starts with one of ``beginnings``; suffixes differ between stores.

    Leading spaces are ignored: stores send them as a keep-alive during long operations.

    Raises:
        IncompleteDocument: The document is empty, or truncated.
        ResponseParserError: It is another document.
    """
    try:
        element = ElementTree.fromstring(raw.strip())  # noqa: S314 - expat expands no external entities
    except ElementTree.ParseError as error:
        raise no_document(raw, beginnings, str(error)) from None
    if not name_of(element).startswith(beginnings):
        raise ResponseParserError(f"no {beginnings[0]}: <{name_of(element)[:50]}>")
    return element


def no_document(raw: bytes, beginnings: Iterable[str], why: str) -> ResponseParserError:
    """Return the error for an answer that cannot be parsed: truncated, or not S3's. ``beginnings``: of the root's name."""
    names = list(beginnings)
    begins = raw[:1000]
    is_cut_off = not begins.strip() or any(f"<{name}".encode() in begins for name in names)
    return (IncompleteDocument if is_cut_off else ResponseParserError)(f"no {names[0]}: {why if begins.strip() else 'empty'}")
