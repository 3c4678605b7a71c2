"""The wait at the end of the script until all checkpoints are durable."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from typing import Any

from trainer_hook.contract import UNSAVED_STATES
from trainer_hook.process.client import Client
from trainer_hook.process.log import info, warn
from trainer_hook.process.signals import StopSignal, exit_now

DEGRADED_TIMEOUT_S = 30.0
FLUSH_POLL_S = 5.0
OTHER_NODES_TIMEOUT_S = 120.0
"""Longest wait of a node whose own part is in the store for the other nodes: they commit without it, or are dead."""
STANDSTILL_TIMEOUT_S = 600.0
"""Longest standstill: nothing is being sent and nothing that is missing comes further, for reasons that the sidecar gives.

A lease that never comes or a file that cannot be read has no end; a back-off of the sidecar takes minutes. While a checkpoint
is being sent, its ``sent_bytes`` may rest longer: they count finished parts, of which a slow link has many in flight.
"""
NAMED = 3
"""Number of checkpoints that were not saved that the log names."""


def wait_until_durable(client: Client, stop: StopSignal, not_saved: Collection[str] = ()) -> str | None:
    """Wait until all finished checkpoints are durable, or a signal comes. Returns which ones are not; ``None``: all are.

    ``not_saved``: names whose save failed, for the log.
    """
    trouble_lasts, others_last = _Limit(DEGRADED_TIMEOUT_S), _Limit(OTHER_NODES_TIMEOUT_S)
    standstill, lost, said = _Standstill(), dict[str, str](), ""
    while stop.notice_at_s is None:
        try:
            flushed = client.flush(timeout_s=FLUSH_POLL_S)
            fates = [m for m in flushed.missing if m.get("state") in UNSAVED_STATES]
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
        if why := trouble if trouble_lasts.is_over(bool(trouble)) else standstill.over(missing):
            warn(f"ends without waiting any longer for {names}: {why}")
            return f"{names}: {why}"
        if others_last.is_over(bool(missing) and all(m.get("state") == "uploaded" for m in missing)):
            warn(f"ends: its part of {names} is in the store, and those of other nodes are not")
            return f"{names}: parts of other nodes are missing"
        text = f"waiting until {names} {'is' if len(missing) == 1 else 'are'} durable" + (f": {trouble}" if trouble else "")
        if text != said:
            info(text)
        said = text
        if trouble:
            time.sleep(1)
    return None


class _Limit:
    """A limit on how long a condition may hold without a break."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since_s: float | None = None

    def is_over(self, lasts: bool) -> bool:
        now_s = time.monotonic()
        self._since_s = (self._since_s or now_s) if lasts else None
        return self._since_s is not None and now_s - self._since_s >= self._most_s


class _Standstill:
    """The time in which nothing comes further, since the last state that was not there before."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._sent_bytes: dict[str, int] = {}
        self._lasts_s = 0.0
        self._looked_s = time.monotonic()

    def over(self, missing: list[dict[str, Any]]) -> str | None:
        """Return what stands still, and why, if it has done so for too long."""
        since_s, self._looked_s = self._looked_s, time.monotonic()
        if self._is_news(missing):
            self._lasts_s = 0.0
        elif any(m.get("reason") for m in missing) and not any(map(_is_being_sent, missing)):
            self._lasts_s += self._looked_s - since_s
        if self._lasts_s < STANDSTILL_TIMEOUT_S:
            return None
        states = "; ".join(f"{m['checkpoint']} is {m.get('state')}, {m.get('reason') or 'and waits'}" for m in missing)
        return f"nothing has changed for {STANDSTILL_TIMEOUT_S / 60:.0f} minutes: {states}"

    def _is_news(self, missing: list[dict[str, Any]]) -> bool:
        # A retry passes through the same states and bytes again; its reason counts the failures.
        states: set[Any] = {(m["checkpoint"], m.get("state"), re.sub(r"\d+", "", m.get("reason") or "")) for m in missing}
        states.add(frozenset(m["checkpoint"] for m in missing))
        sent_bytes = {m["checkpoint"]: m.get("sent_bytes") or 0 for m in missing}
        further = {name: sent for name, sent in sent_bytes.items() if sent > self._sent_bytes.get(name, 0)}
        is_news = bool(states - self._seen or further)
        self._seen |= states
        self._sent_bytes |= further
        return is_news


def _is_being_sent(missing: dict[str, Any]) -> bool:
    return missing.get("state") == "uploading" and not missing.get("reason")


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
