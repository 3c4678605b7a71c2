"""Parsers of spot interruption notices from the clouds' metadata services."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

AWS_NOTICE_S = 120.0
"""Source: EC2 user guide, "Spot Instance interruption notices"."""
GCP_NOTICE_S = 30.0
"""Source: Compute Engine, "Preemption process"."""
AZURE_NOTICE_S = 30.0
"""Least notice of a Preempt event. Source: Azure, "Scheduled Events"."""


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """The cloud will take the machine away."""

    identity: str
    """Identifies the notice among others."""
    ends_in_s: float


def aws_action(raw: bytes, *, now_s: float) -> SpotNotice | None:
    """Read ``spot/instance-action``: ``{"action": "terminate", "time": "2026-09-18T08:22:00Z"}``.

    Returns:
        ``None`` if it is another document. "stop" and "hibernate" end the pod, too, and count.
    """
    fields = _object(raw)
    if fields.get("action") not in ("terminate", "stop", "hibernate"):
        return None
    ends_in_s = _ends_in_s(_iso(fields.get("time")), now_s=now_s, otherwise_s=AWS_NOTICE_S)
    return SpotNotice(f"aws {fields.get('time')}", min(ends_in_s, AWS_NOTICE_S))


def aws_rebalance(raw: bytes) -> str | None:
    """Read ``events/recommendations/rebalance`` and return its time; ``None`` if it is another document."""
    at = _object(raw).get("noticeTime")
    return at if isinstance(at, str) else None


def gcp_preempted(raw: bytes) -> SpotNotice | None:
    """Read ``instance/preempted``: ``TRUE`` or ``FALSE``."""
    return SpotNotice("gcp", GCP_NOTICE_S) if raw.strip().upper() == b"TRUE" else None


def azure_preempt(raw: bytes, *, machine: str, now_s: float) -> SpotNotice | None:
    """Read ``scheduledevents`` and return the first ``Preempt`` event of a machine.

    Args:
        raw: The document, which also names events of other machines of the same set.
        machine: This machine's name in ``Resources``; empty: unknown, every event counts.
        now_s: Epoch seconds.
    """
    for event in _events(raw):
        resources = event.get("Resources")
        is_ours = not machine or not isinstance(resources, list) or machine in resources
        if event.get("EventType") == "Preempt" and is_ours:
            ends_in_s = _ends_in_s(_http_date(event.get("NotBefore")), now_s=now_s, otherwise_s=AZURE_NOTICE_S)
            return SpotNotice(f"azure {event.get('EventId')}", ends_in_s)
    return None


def _events(raw: bytes) -> Iterator[dict[str, Any]]:
    events = _object(raw).get("Events")
    yield from (event for event in events if isinstance(event, dict)) if isinstance(events, list) else ()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _ends_in_s(at: datetime | None, *, now_s: float, otherwise_s: float) -> float:
    """Return the seconds until ``at``; ``otherwise_s`` if that is unknown, or in the past.

    A time in the past means a wrong clock, because the machine is still running; taken literally, it would void the notice.
    """
    if at is None:
        return otherwise_s
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    left_s = at.timestamp() - now_s
    return left_s if left_s > 0 else otherwise_s


def _iso(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _http_date(text: Any) -> datetime | None:
    try:
        return parsedate_to_datetime(text) if isinstance(text, str) and text else None
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
