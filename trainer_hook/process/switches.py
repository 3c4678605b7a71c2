"""Settings that are on or off."""

from __future__ import annotations

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")


def is_off(text: str) -> bool:
    """Whether the text of a setting, which may be empty or invalid, turns it off."""
    return text.strip().lower() in FALSE
