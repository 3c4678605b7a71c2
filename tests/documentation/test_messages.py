"""Messages of the programs name no path of the repository: a pod has no copy of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for package in ("sidecar", "trainer_hook", "checkpoint_sidecar") for path in (ROOT / package).rglob("*.py")
)
PAGE = re.compile(r"(?<!/)\bdocs/|\b[A-Z]{4,}\.md\b")
BINARY_UNIT = re.compile(r"\b[KMGT]iB\b")
OF_THE_REPOSITORY = {"reference.py", "metrics_reference.py"}
"""They make pages of the repository."""
EXAMPLES = {"sidecar/amounts.py", "sidecar/daemon/settings.py"}
"""They name what a user may write."""


def said(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the texts of a module, without docstrings and other texts that are statements of their own."""
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node


@pytest.mark.parametrize("wrong", [PAGE, BINARY_UNIT], ids=["page of the repository", "binary unit"])
def test_no_message_has_a(wrong: re.Pattern[str]) -> None:
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        if path.name in OF_THE_REPOSITORY or (wrong is BINARY_UNIT and name in EXAMPLES):
            continue
        found += [
            f"{name}:{node.lineno}: {node.value}" for node in said(ast.parse(path.read_text())) if wrong.search(node.value)
        ]
    assert found == []
