"""Sanitising of untrusted text, such as a file's name or a trainer's answer, for logs, API answers and terminals."""

from __future__ import annotations

MOST_CHARACTERS = 2000
"""Longer text is truncated, because every status, event and report repeats it."""


def plain_text(text: str) -> str:
    """Return text that can be encoded and displayed: invalid UTF-8 and control characters are escaped, long text is cut."""
    shown = "".join(_shown(character) for character in text[:MOST_CHARACTERS])
    is_whole = len(text) <= MOST_CHARACTERS and len(shown) <= MOST_CHARACTERS  # an escaped character has up to six
    return shown if is_whole else f"{shown[:MOST_CHARACTERS]}…"


def _shown(character: str) -> str:
    is_control = ord(character) < 32 or 127 <= ord(character) < 160
    is_half = 0xD800 <= ord(character) < 0xE000  # of a pair, or a byte of a name that is no UTF-8
    return ascii(character)[1:-1] if is_control or is_half else character
