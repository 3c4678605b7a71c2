"""What a command prints: an answer on standard output, one line on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

PROGRAM = "checkpoint-sidecar"


def print_answer(answer: Any, text: Callable[[Any], str], *, as_json: bool) -> None:
    """Print an answer of the API, for programs or for people. An empty text prints nothing."""
    shown = json.dumps(answer) if as_json else text(answer)
    if shown:
        print(shown, flush=True)


def fail(text: str, code: int, *, as_json: bool = False) -> int:
    """Print one line on standard error, for programs also an object with ``error`` on standard output. Returns ``code``."""
    if as_json:
        print(json.dumps({"error": text.strip().removeprefix(": "), "exit_code": code}), flush=True)
    print(f"{PROGRAM}{text}", file=sys.stderr, flush=True)
    return code
