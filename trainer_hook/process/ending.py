"""The wait at the end of the script until all checkpoints are durable."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from trainer_hook.process.client import Client
from trainer_hook.process.log import info, warn
from trainer_hook.process.signals import StopSignal, exit_now

DEGRADED_TIMEOUT_S = 30.0
FLUSH_POLL_S = 5.0
OTHER_NODES_TIMEOUT_S = 120.0
"""Longest wait of a node whose own part is in the store for the other nodes: they commit without it, or are dead."""
NAMED = 3
"""Number of checkpoints that were not saved that the log names."""
NEVER_DURABLE = frozenset({"lost", "given-up", "rejected"})
"""Final states, which the sidecar reports once, to the waiting call."""


def wait_until_durable(client: Client, stop: StopSignal, not_saved: Collection[str] = ()) -> str | None:
    """Wait until all finished checkpoints are durable, or a signal comes. Returns which ones are not; ``None``: all are.

    ``not_saved``: names whose save failed, for the log.
    """
    trouble_lasts, others_last = _Patience(DEGRADED_TIMEOUT_S), _Patience(OTHER_NODES_TIMEOUT_S)
    lost: dict[str, str] = {}
    while stop.notice_at_s is None:
        try:
            flushed = client.flush(timeout_s=FLUSH_POLL_S)
            fates = [m for m in flushed.missing if m.get("state") in NEVER_DURABLE]
            lost |= {m["checkpoint"]: m["state"] + (f", {m['reason']}" if m.get("reason") else "") for m in fates}
            for name in flushed.durable:  # saved again meanwhile
                lost.pop(name, None)
            missing = [m for m in flushed.missing if m["checkpoint"] not in lost]
            if not missing:
                return _ended(lost, not_saved)
            trouble = client.degraded()
        except OSError as error:
            missing, trouble = [], f"no sidecar answers ({error})"
        names = ", ".join(map(_progress, missing)) or "the last checkpoints"
        if trouble_lasts.is_over(bool(trouble)):
            warn(f"ends without waiting any longer for {names}: {trouble}")
            return f"{names}: {trouble}"
        if others_last.is_over(bool(missing) and all(m.get("state") == "uploaded" for m in missing)):
            warn(f"ends: its part of {names} is in the store, and those of other nodes are not")
            return f"{names}: parts of other nodes are missing"
        info(f"waiting until {names} {'is' if len(missing) == 1 else 'are'} durable" + (f": {trouble}" if trouble else ""))
        if trouble:
            time.sleep(1)
    return None


class _Patience:
    """A limit on how long a condition may hold without a break."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since_s: float | None = None

    def is_over(self, lasts: bool) -> bool:
        now_s = time.monotonic()
        self._since_s = (self._since_s or now_s) if lasts else None
        return self._since_s is not None and now_s - self._since_s >= self._most_s


def _progress(missing: dict[str, Any]) -> str:
    sent_bytes, size_bytes = missing.get("sent_bytes"), missing.get("size_bytes")
    return str(missing["checkpoint"]) + (
        f" ({sent_bytes / 1e6:.0f} of {size_bytes / 1e6:.0f} MB)" if sent_bytes is not None and size_bytes else ""
    )


def _ended(lost: dict[str, str], not_saved: Collection[str]) -> str | None:
    first, more = ", ".join(list(not_saved)[:NAMED]), len(not_saved) - NAMED
    unsaved = f"; not saved: {first}{f' and {more} more' if more > 0 else ''}" if not_saved else ""
    if lost:
        told = "; ".join(f"{name} ({fate})" for name, fate in sorted(lost.items()))
        warn(f"not durable: {told}; everything else is{unsaved}")
        return told
    if unsaved:
        warn(f"everything that was saved is durable{unsaved}")
    else:
        info("everything is durable")
    return None


def end_after_failure(why: str) -> None:
    """Exit 1 for ``CKPT_ON_STORE_FAILURE=fail``, at a time when raising has no effect."""
    warn(f"exits 1 because CKPT_ON_STORE_FAILURE=fail: {why}")
    exit_now(1)
