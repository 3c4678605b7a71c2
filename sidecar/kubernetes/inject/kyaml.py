"""YAML in braces with an entry a line, as Kubernetes writes it since 1.34 (KEP-5295, "KYAML").

ruamel.yaml puts all of such a document into one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*", re.ASCII)
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def kyaml(document: Any) -> str:
    """Return the text of a document of mappings, lists and scalars; keys are strings. It ends with a line break."""
    return _written(document, "") + "\n"


def _written(value: Any, indent: str) -> str:
    if isinstance(value, Mapping):
        return _mapping(value, indent) if value else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _list(value, indent) if value else "[]"
    if type(value).__name__ == "PlainScalarString":  # a word that Kubernetes reads as another type, such as yes
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if type(value).__name__ == "ScalarInt":  # 0755 is octal to Kubernetes
        return f"{value:0{getattr(value, '_width', None) or 1}d}"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return str(value)  # a date


def _mapping(value: Mapping[Any, Any], indent: str) -> str:
    inner = indent + "  "
    lines = [f"{inner}{_key(str(key))}: {_written(entry, inner)},\n" for key, entry in value.items()]
    return "{\n" + "".join(lines) + indent + "}"


def _list(value: Sequence[Any], indent: str) -> str:
    # Brackets of the list and braces of its entries share lines.
    if all(isinstance(entry, Mapping) and entry for entry in value):
        return "[" + ", ".join(_mapping(entry, indent) for entry in value) + "]"
    inner = indent + "  "
    return "[\n" + "".join(f"{inner}{_written(entry, inner)},\n" for entry in value) + indent + "]"


def _key(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _WORDS else json.dumps(key, ensure_ascii=False)
