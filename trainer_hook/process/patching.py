"""Attributes of the libraries' objects, replaced for the length of a context."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_INHERITED = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object, class or module. What it inherits is inherited again afterwards."""
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is not _INHERITED:
            setattr(owner, name, before)
        elif name in vars(owner):
            delattr(owner, name)


def surrounded(
    owner: Any,
    method: str,
    *,
    before: Callable[[], Any] | None = None,
    during: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    after: Callable[[], Any] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Have each call of a method preceded by ``before``, run inside ``during`` and, if it succeeds, followed by ``after``."""
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        with during():
            result = original(*args, **kwargs)
        if after is not None:
            after()
        return result

    return replaced(owner, method, wrapper)
