"""Growing waits between uploads of a checkpoint that fail again and again, with the reason and the next step."""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog

from sidecar.core.schedule.backoff import delay_s
from sidecar.errors import CorruptObject, NotFound, PartRefused, SidecarError, UnreadableFile

log = structlog.get_logger()

FIRST_S = 1.0
CAP_S = 300.0
"""An upload that always fails sends its bytes in vain: at most once in five minutes, and everything else goes first."""
NO_ACCIDENT = 3
"""Failures in a row from which on the log has an error instead of a warning."""


class RetryWaits:
    """Counts failures by version of a checkpoint: what is written anew begins anew."""

    def __init__(self, random_0_1: Callable[[], float] = random.random) -> None:
        self._random_0_1 = random_0_1
        self._failures: dict[str, int] = {}

    def failed(self, name: str, version: str, error: SidecarError | OSError) -> tuple[float, str]:
        """Take note of a failure; return the seconds to wait before the next upload, and the reason for the status."""
        failures = self._failures[version] = self._failures.get(version, 0) + 1
        wait_s = delay_s(failures, random_0_1=self._random_0_1(), first_s=FIRST_S, cap_s=CAP_S)
        say = log.error if failures >= NO_ACCIDENT else log.warning
        again_in_s, hint = round(wait_s, 1), next_step(error)
        say("upload_starts_again", checkpoint=name, error=str(error), failures=failures, again_in_s=again_in_s, hint=hint)
        return wait_s, f"{error}; failed {failures} times, tried again after {wait_s:.0f} s: {hint}"

    def forget(self, version: str) -> None:
        """This version is durable, or nothing more is sent of it."""
        self._failures.pop(version, None)


def next_step(error: SidecarError | OSError) -> str:
    """Return what a person can look at when an upload fails for this reason again and again."""
    match error:
        case CorruptObject():
            return "bytes change on the way: check this node's memory and network, what stands before the store, and its disks"
        case PartRefused():
            return "the store refused a part by its number or size: the file is sent again in other parts; see CKPT_PART_SIZE"
        case NotFound():
            return "an unfinished upload was aborted: check the bucket's lifecycle rules and what else cleans it"
        case UnreadableFile() | OSError():
            return "check the volume of CKPT_DIR"
        case _:
            return "check the log of the store"
