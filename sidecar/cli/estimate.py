"""Estimates of ``plan``: from option text to numbers, and from numbers to text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from sidecar.amounts import amount_bytes
from sidecar.cli.client import Client
from sidecar.cli.output import print_answer, say
from sidecar.core.format.durations import duration_s
from sidecar.errors import ConfigurationError

MOST_BYTES = 10**18
_Parsed = TypeVar("_Parsed")
Line = tuple[str, str]
"""What a line of an estimate is about, and what it says of it."""


Size = Annotated[str | None, typer.Option("--size", metavar="SIZE", help="of one checkpoint, such as 48GB")]
Rate = Annotated[str | None, typer.Option("--rate", metavar="RATE", help="to the store, such as 200MB/s")]
Measured = Annotated[bool, typer.Option("--measured", help="take what the running sidecar has measured")]


def print_estimate(
    lines: Sequence[Line], *, formula: str, source: str, inputs: dict[str, Any], results: dict[str, Any], as_json: bool
) -> int:
    """Print an estimate: ``lines`` for people; as JSON with formula, source and inputs, whose names end with their unit.

    Returns 0.
    """
    answer = {"formula": formula, "source": source, "inputs": _rounded(inputs), "results": _rounded(results)}
    width = max(len(about) for about, _ in lines)
    text = "\n".join(f"{about.ljust(width)}  {said}" for about, said in lines)
    return print_answer(answer, lambda _: text, as_json=as_json)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with six digits at most where they are calculated."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}


def usd_text(dollars: float) -> str:
    """Return an amount of money: whole dollars from 10 on, else four digits."""
    text = f"{abs(dollars):,.0f}" if abs(dollars) >= 10 else f"{abs(dollars):.4g}"
    return f"{'-' if dollars < 0 else ''}${text}"


def percent_text(percent: float) -> str:
    """Return a percentage with two decimals."""
    return f"{percent:.2f} %"


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
