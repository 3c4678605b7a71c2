"""``pod.json`` in the state directory: the pod that uses the volume, when it began, and what earlier pods left there."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from typing import Any

import structlog

from sidecar.volume.boot import boot_id
from sidecar.volume.volume import Volume
from trainer_hook.contract import ContractError, epoch_seconds, rfc3339

log = structlog.get_logger()

POD = "pod.json"
"""Its file in the state directory."""
MOST_INHERITED = 10_000


@dataclass(frozen=True, slots=True)
class PodRecord:
    """One pod's use of the volume."""

    since_s: float
    """When its first sidecar process began, epoch seconds by the node's clock."""
    boot_id: str
    booted_s: float
    """The same in seconds since the node booted: this clock is never set, and also counts while the machine is suspended."""
    inherited: frozenset[str]
    """Versions of the finished checkpoints that an earlier pod left on the volume."""


def begin(volume: Volume, pod: str, *, now_s: float) -> tuple[PodRecord, bool]:
    """Return the record of a pod, and whether this is its first sidecar process; then the record is written.

    Args:
        volume: The volume, with its state directory.
        pod: The pod.
        now_s: Start of this process, epoch seconds.

    Raises:
        OSError: The volume cannot be read now. Nothing was written.
    """
    present, booted_s = boot_id(), boot_clock_s()
    known = decode_record(volume.read_state(POD, surely=True), pod)
    if known is not None:
        # The node was restarted since: the pod is at least as old as this run of the kernel.
        return (known if known.boot_id == present else replace(known, boot_id=present, booted_s=0.0)), False
    record = PodRecord(now_s, present, booted_s, frozenset(volume.finished_versions()[:MOST_INHERITED]))
    fields = {
        "pod": pod,
        "since": rfc3339(record.since_s),
        "boot_id": present,
        "booted_s": booted_s,
        "inherited": sorted(record.inherited),
    }
    try:
        (volume.state / POD).publish(json.dumps(fields).encode())
    except OSError as error:
        log.warning("pod_not_written", path=POD, error=error.strerror)
    return record, True


def boot_clock_s() -> float:
    """Return the seconds since the node booted."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def decode_record(raw: bytes | None, pod: str) -> PodRecord | None:
    """Return the record of a pod; ``None``: another pod's, none, or malformed."""
    try:
        fields = json.loads(raw or b"{}")
        if fields["pod"] != pod:
            return None
        return PodRecord(
            since_s=epoch_seconds(fields["since"]),
            boot_id=str(_or(fields.get("boot_id"), str, "")),
            booted_s=min(max(0.0, float(_or(fields.get("booted_s"), (int, float), 0.0))), boot_clock_s()),
            inherited=frozenset(map(str, _or(fields.get("inherited"), list, []))),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, ContractError):
        return None


def _or(value: Any, kind: Any, other: Any) -> Any:
    return value if isinstance(value, kind) else other
