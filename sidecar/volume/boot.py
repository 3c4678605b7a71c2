"""The present run of the kernel. What an earlier one had not written to the disk is gone."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Identifies the present run of the kernel. Source: random(4)."""


def boot_id() -> str:
    """Return the id of the present run of the kernel; empty: unknown."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
