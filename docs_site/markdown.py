"""Links and anchors of Markdown, read alike by the tests and by the site."""

from __future__ import annotations

import re
from collections.abc import Callable

_FENCE = re.compile(r"^( *)(```+|~~~+)[^\n]*\n.*?^\1\2[^\n]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\]|`[^`]*`)*\]\()([^()\s]+)((?:\s+\"[^\"]*\")?\))")
_HTML = re.compile(r"(<(?:a|img|source)\b[^>]*?\b(?:href|src|srcset)=\")([^\"]+)(\")")
_HEADING = re.compile(r"^#{1,6} +(.*?)\s*#*\s*$", re.MULTILINE)
_ID = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def slug(heading: str, _separator: str = "-") -> str:
    """Return a heading's anchor, as GitHub forms it."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"<[^>]+>", "", text)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def without_code(text: str) -> str:
    """Return the text with the blocks and spans of code blanked, at the same length."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return _CODE.sub(blank, _FENCE.sub(blank, text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page; a heading that comes twice has a number, as on GitHub."""
    prose, found = _FENCE.sub("", text), set(_ID.findall(text))
    count: dict[str, int] = {}
    for heading in _HEADING.findall(prose):
        name = slug(heading)
        count[name] = count.get(name, -1) + 1
        found.add(f"{name}-{count[name]}" if count[name] else name)
    return found


def links(text: str) -> list[str]:
    """Return the targets of all links and pictures, outside code."""
    return [text[start:end] for start, end in _places(text)]


def with_links(text: str, change: Callable[[str], str]) -> str:
    """Return the text with each target of a link or picture replaced by what ``change`` returns for it."""
    done = text
    for start, end in sorted(_places(text), reverse=True):
        done = done[:start] + change(text[start:end]) + done[end:]
    return done


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language (empty: none is named) and the content of each block of code."""
    return [
        (match[2].strip(), match[3]) for match in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE)
    ]


def code_spans(text: str) -> list[str]:
    """Return the spans of code, outside blocks."""
    return [" ".join(match[0].strip("`").split()) for match in _CODE.finditer(_FENCE.sub("", text))]


def _places(text: str) -> list[tuple[int, int]]:
    # A span of code may be a link's text: only targets inside code are no links.
    blanked = without_code(text)
    found = []
    for pattern in (_LINK, _HTML):
        for match in pattern.finditer(text):
            start, end = match.span(2)
            if blanked[start:end] == text[start:end]:
                found.append((start, end))
    return found
