"""What S3 answers in XML. Namespaces are not told apart: some stores leave them out."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from botocore.parsers import ResponseParserError


def name_of(element: ElementTree.Element) -> str:
    """Return an element's name without its namespace."""
    return element.tag.rpartition("}")[2]


def texts(element: ElementTree.Element) -> dict[str, str]:
    """Return the texts of what is directly in an element, by name; the last of several."""
    return {name_of(part): part.text or "" for part in element}


def children(element: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    """Yield what is directly in an element and has this name."""
    return (part for part in element if name_of(part) == name)


def parsed(raw: bytes, *beginnings: str) -> ElementTree.Element:
    """Return the outermost element, whose name has one of these beginnings: how it ends is not the same in all stores.

    A store that needs long sends spaces, to say that it is there.

    Raises:
        ResponseParserError: It is something else, as botocore says it.
    """
    try:
        element = ElementTree.fromstring(raw.strip())  # noqa: S314 - expat expands no external entities
    except ElementTree.ParseError as error:
        raise ResponseParserError(f"no {beginnings[0]}: {error}") from None
    if not name_of(element).startswith(beginnings):
        raise ResponseParserError(f"no {beginnings[0]}: <{name_of(element)[:50]}>")
    return element
