"""Estimates of ``plan``: from option text to numbers, and from numbers to text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from sidecar.amounts import amount_bytes
from sidecar.cli.client import Client
from sidecar.cli.output import print_answer, say
from sidecar.cli.render import table
from sidecar.core.format.durations import duration_s
from sidecar.errors import ConfigurationError

MOST_BYTES = 10**18
_GB_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_Parsed = TypeVar("_Parsed")


Size = Annotated[str | None, typer.Option("--size", metavar="SIZE", help="of one checkpoint, such as 48GB")]
Rate = Annotated[str | None, typer.Option("--rate", metavar="RATE", help="to the store, such as 200MB/s")]
Measured = Annotated[bool, typer.Option("--measured", help="take what the running sidecar has measured")]


def print_estimate(formula: str, source: str, inputs: dict[str, Any], results: dict[str, Any], *, as_json: bool) -> int:
    """Print a result with its formula, source and inputs. Returns 0. Names end with the unit of their value."""
    answer = {"formula": formula, "source": source, "inputs": inputs, "results": results}
    return print_answer(answer, estimate_text, as_json=as_json)


def estimate_text(answer: dict[str, Any]) -> str:
    """Return an estimate for people: results, then inputs, formula and source."""
    rows = [[name, _value_text(name, value)] for name, value in answer["results"].items() if value is not None]
    given = [[name, _value_text(name, value)] for name, value in answer["inputs"].items() if value is not None]
    tables = [table(["RESULT", ""], rows), "", table(["INPUT", ""], given), ""]
    return "\n".join([*tables, f"formula: {answer['formula']}", f"source: {answer['source']}"])


def parsed(option: str, text: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    """Return the value of an option.

    Raises:
        ConfigurationError: ``parse`` raised ValueError.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigurationError(f"{option}={text!r}: {error}") from None


def parsed_bytes(option: str, text: str) -> int:
    """Return the bytes of an option's size or rate. Says on standard error that a small number without a unit is bytes.

    Raises:
        ConfigurationError: As ``size_bytes``.
    """
    amount = parsed(option, text, size_bytes)
    number = text.strip().removesuffix("/s")
    if amount < 1000 and not number[-1].isalpha():
        say(f"{option}={text}: the unit is bytes; did you mean {number}MB or {number}GB?")
    return amount


def size_bytes(text: str) -> int:
    """Return the bytes of a size or rate such as ``275GB`` or ``200MB/s``.

    Raises:
        ValueError: It is none, is 0, or is more than ``MOST_BYTES``.
    """
    amount = int(amount_bytes(text))
    if not 0 < amount <= MOST_BYTES:
        raise ValueError("must be more than 0 and at most 1000PB")
    return amount


def positive_s(text: str) -> float:
    """Return the seconds of a duration.

    Raises:
        ValueError: It is none, or 0.
    """
    if (seconds := duration_s(text)) <= 0:
        raise ValueError("must be more than 0")
    return seconds


def measured_size_bytes() -> int:
    """Return the size of the largest checkpoint that the running sidecar knows.

    Raises:
        ConfigurationError: It knows none.
    """
    sizes = [c["size_bytes"] or 0 for c in Client(timeout_s=60).get("/v1/checkpoints")["checkpoints"]]
    if not max(sizes, default=0):
        raise ConfigurationError("--measured: the running sidecar knows no checkpoint with a size yet; give --size")
    return int(max(sizes))


def check_number(option: str, number: float) -> None:
    """Raise ConfigurationError unless a number of an option is finite and within its limits."""
    if not 0.0 <= number <= 1e9:
        raise ConfigurationError(f"{option}={number}: must be a number from 0 to 1,000,000,000")


def _value_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("bytes_per_s"):
        return f"{_decimal_text(value)}/s"
    unit = name.rpartition("_")[2]
    shown = {"bytes": _decimal_text, "s": _duration_text, "usd": _usd_text, "percent": _percent_text}.get(unit)
    return shown(value) if shown else f"{value:,.12g}"


def _decimal_text(amount: float) -> str:
    # Decimal, as guides and vendors count; the units of the volume's status are binary.
    unit = 0
    while round(amount, 1) >= 1000 and unit < len(_GB_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:,.1f}".removesuffix(".0") + f" {_GB_UNITS[unit]}"


def _duration_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 1 else f"{seconds:.1f}".removesuffix(".0") + " s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min ({seconds:.0f} s)"
    return f"{minutes // 60} h {minutes % 60} min ({seconds:.0f} s)"


def _usd_text(dollars: float) -> str:
    text = f"{abs(dollars):,.0f}" if abs(dollars) >= 10 else f"{abs(dollars):.4g}"
    return f"{'-' if dollars < 0 else ''}${text}"


def _percent_text(percent: float) -> str:
    return f"{percent:.2f} %"
