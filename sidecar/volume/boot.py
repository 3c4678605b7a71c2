"""Id of the present run of the kernel. A power failure loses what an earlier run had not written to the disk."""

from __future__ import annotations

from pathlib import Path

from trainer_hook.contract import BOOT_ID


def boot_id() -> str:
    """Return the id of the present run of the kernel; empty: unknown."""
    try:
        return Path(BOOT_ID).read_text().strip()
    except OSError:
        return ""
