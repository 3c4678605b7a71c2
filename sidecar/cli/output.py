"""What a command prints: an answer on standard output, one line on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sidecar.cli.streams import OutputLost
from trainer_hook.contract.plain_text import plain_text

PROGRAM = "checkpoint-sidecar"
COMPLETE = "_CHECKPOINT_SIDECAR_COMPLETE"
"""Variable by which a shell asks for completions."""
_OUTLOOK = re.compile(r"[;:,] it is tried again(, with fewer requests at once)?(?=$|: )")


def print_answer(answer: Any, text: Callable[[Any], str], *, as_json: bool) -> int:
    """Print an answer of the API, for programs or for people. An empty text prints nothing. Returns 0, the exit code."""
    said = text(answer)  # also for programs: another program's answer lacks what the text has, and is an error
    shown = json.dumps(answer) if as_json else said
    if shown:
        print(shown, flush=True)
    return 0


def print_path(answer: dict[str, Any], command: str, *, said: str | None, code: int, as_json: bool) -> int:
    """Print the outcome of a resume or a pull: the path alone on standard output, all else on standard error.

    Args:
        answer: Has ``state``, ``path`` and ``passed_over``, the latter with ``checkpoint`` and ``reason``.
        command: The command's name.
        said: Why there is no path, or what is to be known about it; ``None``: nothing. Not ``None`` unless the code is 0.
        code: The exit code, which is returned.
        as_json: Print the answer for programs, with ``error`` and ``exit_code`` unless the code is 0.
    """
    if as_json:
        print(json.dumps(answer | ({"error": f"{command}: {said}", "exit_code": code} if code else {})), flush=True)
    elif answer["state"] == "ready":
        print(answer["path"], flush=True)
    lines = [f"passed over {passed['checkpoint']}: {passed['reason']}" for passed in answer["passed_over"]]
    for line in [*lines, *([said] if said else [])]:
        say(line, command)
    return code


def redraw(text: str) -> None:
    """Replace what the terminal shows by a text, without flicker: each line is overwritten, and the rest is cleared."""
    lines = "".join(f"{line}\x1b[K\n" for line in text.splitlines())
    print(f"\x1b[H{lines}\x1b[J", end="", flush=True)


def what_failed(error: str) -> str:
    """Return an error of the store without "it is tried again": that is the daemon's outlook, not a command's."""
    return _OUTLOOK.sub("", error)


def say(text: str, command: str = "") -> None:
    """Print one line on standard error; the command goes on."""
    print(f"{PROGRAM}{command and f' {command}'}: {plain_text(text)}", file=sys.stderr, flush=True)


def fail(text: str, code: int, *, as_json: bool = False, program: str = PROGRAM) -> int:
    """Print one line on standard error, for programs also an object with ``error`` on standard output. Returns ``code``."""
    text = what_failed(plain_text(text))  # names in it may come from the store
    if as_json:
        with suppress(OutputLost, BrokenPipeError):  # the line tells it, too
            print(json.dumps({"error": text.strip().removeprefix(": "), "exit_code": code}), flush=True)
    print(f"{program}{text}", file=sys.stderr, flush=True)
    return code
