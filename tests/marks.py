"""What `make test` leaves to `make test-slow`: it runs one example of a rule, not one per store, library or way to fail."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return parameters of a test that `make test` leaves out: ``parametrize("at", [0.5, *slow(0.0, 1.0)])``."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
