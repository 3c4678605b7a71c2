"""The API's answers as text for a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from shutil import get_terminal_size
from typing import Any

from sidecar.core.format.readable import rate_text, seconds_text, size_text
from sidecar.core.lifecycle.safety import cost_text
from trainer_hook.contract.plain_text import plain_text

_LEAST_WRAPPED = 20
"""Narrowest column, in characters, in which sentences are wrapped."""


def counted(number: int, thing: str) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return rows aligned under their header: in colour and fitted to a terminal, plain and as wide as they are elsewhere.

    A terminal too narrow for all columns but the last gets the latter, and wraps the lines: nothing is cut off.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    least = sum(widths[:-1]) + 2 * (len(widths) - 1) + min(widths[-1], _LEAST_WRAPPED)
    # A base install has no rich.
    if sys.stdout.isatty() and least <= get_terminal_size().columns and find_spec("rich"):
        return _fitted(header, rows)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]
    )


def _fitted(header: list[str], rows: list[list[str]]) -> str:
    """Return the rows fitted to the width of the terminal; only the last column is wrapped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in header:
        grid.add_column(Text(name), no_wrap=name != header[-1], overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))  # not as markup: reasons quote names from the volume
    console = Console()
    with console.capture() as captured:
        console.print(grid)
    return captured.get().rstrip("\n")


def status_text(status: dict[str, Any]) -> str:
    """Return ``/v1/status`` for people."""
    risk, store, trainer = status["at_risk"], status["store"], status["trainer"]
    safety = status["safety"]
    lines = [
        f"phase      {status['phase']}",
        f"safety     {safety['level']}: {safety['headline']}",
        *[f"           {reason}" for reason in safety["reasons"]],
        f"store      {store['url']}  " + (f"degraded: {status['degraded_reason']}" if status["degraded"] else _reached(store)),
        f"trainer    {trainer['state'] or 'no hook'}, {counted(trainer['ranks'], 'rank')} alive, "
        f"step {text_of(trainer['step'])}",
        f"durable    step {text_of(status['newest_durable_step'])}",
        f"a kill     {text_of(cost_text(**safety['kill']))}",
        f"SIGTERM    {text_of(cost_text(**safety['sigterm']))}{_prediction(risk)}",
        f"volume     {_volume(status['volume'])}",
    ]
    if status["termination"]:
        left = seconds_text(status["termination"]["deadline_in_s"])
        lines.append(f"notice     {status['termination']['source']}, {left} until the deadline")
    if risk["advice"] and not status["termination"]:
        lines.append(f"too long   {risk['advice']}")
    if trainer.get("save_error"):
        lines.append(f"saves fail {trainer['save_error']}")
    late = [planned for planned in status["flush"] or [] if planned["verdict"] != "fits"]
    lines += [f"{planned['verdict']:<10} {planned['checkpoint']}: {planned['reason']}" for planned in late]
    lines += [f"given up   {name}: {reason}" for name, reason in status["given_up"].items()]
    for state in ("rejected", "bad"):
        lines += [f"{state:<10} {name}: {reason}" for name, reason in status[state].items()]
    if status["queue"]:
        rows = [[t["checkpoint"], t["state"], _share(t), t["reason"] or ""] for t in status["queue"]]
        lines += ["", table(["CHECKPOINT", "STATE", "SENT", "WHY"], rows)]
    return "\n".join(lines)


def _volume(volume: dict[str, Any]) -> str:
    if volume["free_bytes"] is None:
        return "CANNOT BE READ: is it still mounted? The sidecar's log has the error"
    return f"{size_text(volume['free_bytes'])} of {size_text(volume['total_bytes'])} free"


def _prediction(risk: dict[str, Any]) -> str:
    """Return the parts of the predicted time, if there is one."""
    if risk["predicted_durable_s"] is None or not risk["grows"]:
        return ""
    rate = risk["upload_bytes_per_s"]
    upload = f"upload {seconds_text(risk['predicted_flush_s'])}" + (f" at {rate_text(rate)}" if rate else "")
    return f" (save {seconds_text(risk['predicted_save_s'])}, {upload})"


def checkpoints_text(answer: dict[str, Any]) -> str:
    """Return ``/v1/checkpoints`` for people."""
    rows = [
        [
            c["name"],
            c["state"],
            "yes" if c["on_volume"] else "no",
            "yes" if c["in_store"] else "no",
            size_text(c["size_bytes"]),
            c["created_at"] or "–",
            c["reason"] or "",
        ]
        for c in answer["checkpoints"]
    ]
    return table(["CHECKPOINT", "STATE", "VOLUME", "STORE", "SIZE", "SAVED", "WHY"], rows) if rows else "no checkpoints"


def checkpoint_text(answer: dict[str, Any]) -> str:
    """Return ``/v1/checkpoints/NAME``, a line per field that has a value."""
    _ = answer["state"]  # each checkpoint has one: an answer without it is another program's
    return "\n".join(field_lines(answer.items()))


def field_lines(fields: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a line per field that has a value, with the values in one column."""
    known = [(key, value) for key, value in fields if value is not None]
    width = max(len(key) for key, _ in known)
    return [f"{key.ljust(width)}  {_field(key, value)}" for key, value in known]


def _field(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict | list):
        return json.dumps(value)
    return size_text(value) if key.endswith("_bytes") else text_of(value)


def save_text(answer: dict[str, Any]) -> str:
    """Return how far a save on request is."""
    if answer["state"] == "durable":
        return f"{answer['checkpoint']} is durable"
    what = f"{answer['checkpoint']}: {_share(answer)}" if answer["checkpoint"] else answer["action"].replace("-", " ")
    return f"{answer['state']}: {what}; {answer['detail']}"


def _reached(store: dict[str, Any]) -> str:
    return f"verified by {store['verification']}" if store["reached"] else "not reached yet"


def text_of(value: Any) -> str:
    """Return a value as one line, without what a terminal would obey; a dash for ``None``."""
    return "–" if value is None else plain_text(str(value))


def _share(transfer: dict[str, Any]) -> str:
    return f"{100 * transfer['sent_bytes'] / transfer['size_bytes']:.0f} %" if transfer["size_bytes"] else "–"
