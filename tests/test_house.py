"""Limits on the size of modules and functions. The lists of exceptions may only shrink."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("checkpoint_sidecar", "sidecar", "trainer_hook")
MOST_LINES = 400
MOST_FUNCTION_LINES = 40
"""Without the docstring."""

Sizes = Callable[[], dict[str, int]]

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


@cache
def modules() -> dict[str, str]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def files() -> dict[str, int]:
    return {path: text.count("\n") for path, text in modules().items()}


@cache
def functions() -> dict[str, int]:
    """Lines of each function, by module and name; of functions with equal names the longest."""
    found: dict[str, int] = {}
    for path, text in modules().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path}::{node.name}"
                found[name] = max(found.get(name, 0), lines(node))
    return found


def test_no_error_reaches_its_caller_in_a_group() -> None:
    """Up to Python 3.11.3, which Debian has, what is raised inside ``except*`` reaches nobody but as a group."""
    groups = [
        f"{path}:{node.lineno}"
        for path, text in modules().items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.TryStar)
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("TaskGroup") and path != "sidecar/tasks.py")
    ]
    assert not groups, "use sidecar.tasks.task_group and except"


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno is not None
    count = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is None:
        return count
    assert first.end_lineno is not None
    return count - (first.end_lineno - first.lineno + 1)


LIMITS = pytest.mark.parametrize(
    ("sizes_of", "limit", "exceptions"),
    [(files, MOST_LINES, LONG_FILES), (functions, MOST_FUNCTION_LINES, LONG_FUNCTIONS)],
    ids=["files", "functions"],
)


@LIMITS
def test_nothing_is_longer_than_its_limit(sizes_of: Sizes, limit: int, exceptions: dict[str, int]) -> None:
    sizes = sizes_of()
    assert len(sizes) > 200
    too_long = {name: size for name, size in sizes.items() if size > exceptions.get(name, limit)}
    assert not too_long, "split it by what has a name of its own"


@LIMITS
def test_no_exception_is_left_that_is_not_needed(sizes_of: Sizes, limit: int, exceptions: dict[str, int]) -> None:
    stale = {name: size for name, size in exceptions.items() if sizes_of().get(name, 0) <= limit}
    assert not stale, "remove it from the list"


def test_no_test_file_is_longer_than_the_limit() -> None:
    sizes = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")}
    assert not {name: size for name, size in sizes.items() if size > MOST_LINES}, "split it by what has a name of its own"
