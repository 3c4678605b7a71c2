"""Targets by name, their seeds, and the assertions that they share."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
TARGETS = tuple(sorted(path.stem for path in (HERE / "targets").glob("*.py") if path.stem != "__init__"))
MOST_ERROR_CHARACTERS = 2_100
"""Errors are logged and repeated by the API: untrusted text in them is cut."""


@dataclass(frozen=True)
class Target:
    """One target."""

    name: str
    check: Callable[[bytes], None]
    is_json: bool = False
    """Mutations also change values of the parsed document."""
    most_bytes: int = 4096


def target(name: str) -> Target:
    """Import a target."""
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    options = {option.lower(): getattr(module, option) for option in ("IS_JSON", "MOST_BYTES") if hasattr(module, option)}
    return Target(name, module.check, **options)


def constant(name: str, constant: str) -> tuple[Any, ...]:
    """Return the literals of a tuple in a target's module without importing it: none if it has no such tuple."""
    for node in ast.parse((HERE / "targets" / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == constant:
            return tuple(each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
    return ()


def seeds(name: str) -> list[Path]:
    """Return the committed inputs of a target."""
    return sorted((CORPUS / name).iterdir())


def check_text(error: Exception, *, names: str = "") -> None:
    """Check that an error can be logged in one line. ``names``: what it begins with."""
    text = str(error)
    assert text.strip()
    assert text.startswith(names)
    assert len(text) <= MOST_ERROR_CHARACTERS, f"{len(text)} characters: {text[:200]}"
    assert not any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in text), repr(text[:300])
