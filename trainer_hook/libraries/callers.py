"""Who calls: a library's own code, or the script."""

from __future__ import annotations

import sys
from types import FrameType


def is_called_from(package: str) -> bool:
    """Whether code of a package is among the callers. ``package``: the beginning of its modules' names, such as ``optuna.``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(package):
        frame = frame.f_back
    return frame is not None
