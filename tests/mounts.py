"""File systems of their own for tests. Mounting needs root, which CI has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_volume(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of a size, such as ``2m``, at ``folder``. The test is skipped where this user may not mount."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "none"):
        yield folder


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """Mount at ``folder``, which is made if it is missing, with the options of mount(8). Skips as ``small_volume``."""
    folder.mkdir(exist_ok=True)
    if os.geteuid():
        pytest.skip("mounting needs root")
    mounting = subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True, text=True)
    if mounting.returncode:
        pytest.skip(f"this container may not mount: {mounting.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
