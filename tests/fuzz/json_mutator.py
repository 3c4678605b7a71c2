"""Mutations of a JSON document: a value replaced, removed, repeated or moved. Its syntax stays valid, which bytes rarely do."""

from __future__ import annotations

import copy
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        99_999,
        100_000,
        1 << 31,
        1 << 50,
        (1 << 63) - 1,
        1 << 63,
        1 << 64,
        10**400,
        -(10**400),
    ),
    *(0.0, -0.0, 0.5, 1e300, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", ".", "..", "a", "a/b", "/", "\x00", "\n", "\u2028", "\ud800", "é", "e\u0301", "x" * 300, "x/" * 500),
    *(
        "checkpoint-20",
        "checkpoint-020",
        "final",
        ".complete",
        ".ckpt/a1/x",
        "2026-01-01T00:00:00Z",
        "0001-01-01T00:00:00+23:59",
    ),
    *("9999-12-31T23:59:59-23:59", "0123456789abcdef", "0123456789ABCDEF", "jit", "saved", "running", "dropped", "sigterm"),
    *([], {}, [[]], {"": None}, {"a": {"a": []}}),
)


def deep(levels: int) -> Any:
    """Return an array of arrays."""
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def mutated(document: Any, rng: random.Random) -> Any:
    """Return the document with up to four values changed."""
    root = [document]
    for _ in range(rng.randint(1, 4)):
        container, key = rng.choice(_places(root))
        match rng.randrange(6):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, list) and container is not root:
                container.insert(rng.randint(0, len(container)), copy.deepcopy(container[key]))
            case 2 if isinstance(container, list) and container is not root:
                del container[key]
            case 3:
                other, at = rng.choice(_places(root))
                container[key] = copy.deepcopy(other[at])
            case 4 if isinstance(container, dict):
                container[rng.choice((*container, "", "a", "format", "x" * 50))] = _value(rng)
            case 5 if rng.random() < 0.05:
                container[key] = deep(rng.choice((60, 64, 65, 130, 300)))
            case _:
                container[key] = _changed(container[key], rng)
    return root[0]


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        piece = rng.choice(("", "/", ".", "..", "-", "0", "A", "\x7f", "\ud8ff", "💾", value))
        return value[:at] + piece + value[at + rng.randint(0, 2) :]
    if isinstance(value, int | float) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 0.5))
    return _value(rng)


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))  # documents are no graphs


def _places(container: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    left = [container]
    while left:
        current = left.pop()
        for key in current if isinstance(current, dict) else range(len(current)):
            found.append((current, key))
            if isinstance(current[key], dict | list):
                left.append(current[key])
    return found
