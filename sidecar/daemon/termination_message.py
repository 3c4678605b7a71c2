"""Termination message: the sentence that ``kubectl describe pod`` shows for an ended container."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = Path("/dev/termination-log")
"""Where Kubernetes reads the message. Source: "Determine the Reason for Pod Failure" of its manual; up to 4,096 bytes."""
LONGEST = 2000


def write(sentence: str) -> None:
    """Write the message, where there is such a file."""
    with contextlib.suppress(OSError):
        if FILE.is_file() and os.access(FILE, os.W_OK):
            FILE.write_text(sentence[:LONGEST])
