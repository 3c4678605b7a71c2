"""Quantities of CPU and memory as Kubernetes writes them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_UNITS = {unit: Decimal(10) ** power for unit, power in _DECIMAL.items()}
_UNITS |= {f"{unit}i": Decimal(1 << (10 * power)) for power, unit in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([-+]?[0-9]{1,2}))?", re.ASCII)


def quantity(value: Any) -> Decimal | None:
    """Return the number of CPUs or bytes of a quantity, such as ``500m`` or ``64Gi``; ``None``: it is no quantity."""
    match = _QUANTITY.fullmatch(str(value))
    return Decimal(match[1]) * _UNITS[match[2] or ""] * Decimal(10) ** int(match[3] or 0) if match else None
