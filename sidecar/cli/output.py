"""What a command prints: an answer on standard output, one line on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from sidecar.core.format.plain_text import plain_text

PROGRAM = "checkpoint-sidecar"
COMPLETE = "_CHECKPOINT_SIDECAR_COMPLETE"
"""Variable by which a shell asks for completions."""
_OUTLOOK = re.compile(r"[;:,] it is tried again(, with fewer requests at once)?$")


def print_answer(answer: Any, text: Callable[[Any], str], *, as_json: bool) -> None:
    """Print an answer of the API, for programs or for people. An empty text prints nothing."""
    shown = json.dumps(answer) if as_json else text(answer)
    if shown:
        print(shown, flush=True)


def redraw(text: str) -> None:
    """Replace what the terminal shows by a text, without flicker: each line is overwritten, and the rest is cleared."""
    lines = "".join(f"{line}\x1b[K\n" for line in text.splitlines())
    print(f"\x1b[H{lines}\x1b[J", end="", flush=True)


def what_failed(error: str) -> str:
    """Return an error of the store without "it is tried again": that is the daemon's outlook, not a command's."""
    return _OUTLOOK.sub("", error)


def fail(text: str, code: int, *, as_json: bool = False) -> int:
    """Print one line on standard error, for programs also an object with ``error`` on standard output. Returns ``code``."""
    text = what_failed(plain_text(text))  # names in it may come from the store
    if as_json:
        print(json.dumps({"error": text.strip().removeprefix(": "), "exit_code": code}), flush=True)
    print(f"{PROGRAM}{text}", file=sys.stderr, flush=True)
    return code
