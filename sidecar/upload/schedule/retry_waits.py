"""Backoff between failed uploads of one checkpoint, with the reason and the next step for the operator."""

from __future__ import annotations

import random
from collections.abc import Callable

import structlog

from sidecar.core.schedule.backoff import delay_s
from sidecar.errors import (
    CorruptObject,
    LaterFormat,
    LaterRun,
    NotFound,
    PartRefused,
    SidecarError,
    UnreadableFile,
    UnreadableRun,
)

log = structlog.get_logger()

FIRST_S = 1.0
CAP_S = 300.0
"""Maximum backoff in seconds: an upload that always fails wastes its bytes at most once in this time."""
ERROR_AFTER = 3
"""Number of consecutive failures from which the log level is error, not warning."""

DEFECT_HINT = "this is a defect of the sidecar: report it with the log. The other checkpoints are sent"


class RetryWaits:
    """Counts consecutive failures per version of a checkpoint: a rewritten checkpoint starts at 0."""

    def __init__(self, random_0_1: Callable[[], float] = random.random) -> None:
        self._random_0_1 = random_0_1
        self._failures: dict[str, int] = {}

    def failed(self, name: str, version: str, error: Exception) -> tuple[float, str]:
        """Record a failure; return the seconds until the next upload, and the reason for the status."""
        failures = self._failures[version] = self._failures.get(version, 0) + 1
        wait_s = delay_s(failures, random_0_1=self._random_0_1(), first_s=FIRST_S, cap_s=CAP_S)
        say = log.error if failures >= ERROR_AFTER else log.warning
        again_in_s, hint = round(wait_s, 1), next_step(error)
        say("upload_starts_again", checkpoint=name, error=str(error), failures=failures, again_in_s=again_in_s, hint=hint)
        return wait_s, f"{error}; failed {failures} times, tried again after {wait_s:.0f} s: {hint}"

    def forget(self, version: str) -> None:
        """Forget a version that is durable, or will not be sent."""
        self._failures.pop(version, None)


def next_step(error: Exception) -> str:
    """Return what an operator can check when an upload fails repeatedly for this reason."""
    match error:
        case CorruptObject():
            return "bytes change in transit: check this node's memory and network, proxies in front of the store, and its disks"
        case PartRefused():
            return "the store refused a part by its number or size: the file is sent again in other parts; see CKPT_PART_SIZE"
        case NotFound():
            return "an unfinished upload was aborted: check the bucket's lifecycle rules and other programs that clean it"
        case LaterFormat() | LaterRun():
            return "update the sidecar, or give this run a prefix of its own"
        case UnreadableRun():
            return "node 0 writes the document again while it holds the prefix: look at its log"
        case UnreadableFile() | OSError():
            return "check the volume of CKPT_DIR"
        case SidecarError():
            return "check the log of the store"
        case _:
            return DEFECT_HINT
