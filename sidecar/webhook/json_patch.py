"""The difference between two JSON documents as RFC 6902 operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def difference(old: Any, new: Any, pointer: str = "") -> Iterator[dict[str, Any]]:
    """Yield the operations that turn ``old`` into ``new``, in the order in which they apply."""
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _of_objects(old, new, pointer)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_lists(old, new, pointer)
    elif not _same(old, new):
        yield {"op": "replace", "path": pointer, "value": new}


def _of_objects(old: dict[str, Any], new: dict[str, Any], pointer: str) -> Iterator[dict[str, Any]]:
    for key in old.keys() - new.keys():
        yield {"op": "remove", "path": f"{pointer}/{_escaped(key)}"}
    for key, value in new.items():
        below = f"{pointer}/{_escaped(key)}"
        if key in old:
            yield from difference(old[key], value, below)
        else:
            yield {"op": "add", "path": below, "value": value}


def _of_lists(old: list[Any], new: list[Any], pointer: str) -> Iterator[dict[str, Any]]:
    """Entries that both ends share stay; of those between, as many as there are are changed and the rest removed or added."""
    shorter = min(len(old), len(new))
    front = next((i for i in range(shorter) if not _same(old[i], new[i])), shorter)
    back = next((i for i in range(shorter - front) if not _same(old[-1 - i], new[-1 - i])), shorter - front)
    gone, come = len(old) - front - back, len(new) - front - back
    for index in range(front, front + min(gone, come)):
        yield from difference(old[index], new[index], f"{pointer}/{index}")
    for index in range(front + gone - 1, front + come - 1, -1):
        yield {"op": "remove", "path": f"{pointer}/{index}"}
    for index in range(front + gone, front + come):
        yield {"op": "add", "path": f"{pointer}/{index}", "value": new[index]}


def _same(old: Any, new: Any) -> bool:
    """Equal as JSON: to Python, 1, 1.0 and true are equal, too, also deep inside."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    return type(old) is type(new) and bool(old == new)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
