"""For tests of readers that any input may meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_hook.contract import ContractError


def outcome(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what ``read`` returns, or the ContractError that it raises. Every other exception is a failure."""
    try:
        return read(*args, **kwargs)
    except ContractError as error:
        return error
