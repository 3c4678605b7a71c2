"""Failures of ``torch.distributed.checkpoint``, whose error is no ``Exception``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def sharded_failures() -> Iterator[None]:
    """Raise ``RankFailed`` where ``torch.distributed.checkpoint`` fails, whose own error is no ``Exception``."""
    try:
        yield
    except BaseException as error:
        library: Any = sys.modules.get("torch.distributed.checkpoint.api")
        if library is None or not isinstance(error, library.CheckpointException):
            raise
        from trainer_hook.asynchronous.deferring import RankFailed
        from trainer_hook.asynchronous.sharded import reasons

        raise RankFailed(reasons(error)) from error
