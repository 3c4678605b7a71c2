"""Amounts of bytes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

TOO_MANY_BYTES = 1 << 63
"""Amounts are less: kernels and stores count no further, and rates are computed in floating point."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)(?:/s)?", re.ASCII)


def amount_bytes(text: Any) -> Any:
    """Return the bytes that ``200MB``, ``16Mi``, ``1.5 GiB`` or ``200MB/s`` stand for.

    Raises:
        ValueError: Anything else, and what is no amount of bytes that a machine has.
    """
    if not isinstance(text, str | bool):
        return _possible(text)
    match = _AMOUNT.fullmatch(str(text).strip().lower())  # True is no 1
    if not match or match[2] not in _UNITS:
        raise ValueError("must be an amount such as 200MB, 16Mi or 1.5GiB")
    return _possible(int(Decimal(match[1]) * _UNITS[match[2]]))


def _possible(amount: Any) -> Any:
    if isinstance(amount, int | float) and amount >= TOO_MANY_BYTES:
        raise ValueError("must be less than 8 EiB")
    return amount
