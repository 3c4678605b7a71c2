"""Time at risk: what would be lost if the pod were killed now, and whether a just-in-time save would fit."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.core.lifecycle import margin_s


@dataclass(frozen=True, slots=True)
class Risk:
    """``None`` means not known yet. Seconds and steps that a kill at this instant would cost."""

    seconds_at_risk: float | None
    steps_at_risk: int | None
    predicted_flush_s: float | None
    """From SIGTERM until a checkpoint of the newest one's size would be durable, without the trainer's own writing."""
    fits_grace: bool | None


def risk(
    *,
    durable_at_s: float | None,
    durable_step: int | None,
    trainer_step: int | None,
    checkpoint_bytes: int | None,
    bytes_per_s: float | None,
    grace_s: float,
    now_s: float,
) -> Risk:
    """Return the risk from the newest durable step, the trainer's progress and the measured rate. Times are epoch seconds."""
    flush_s = checkpoint_bytes / bytes_per_s if checkpoint_bytes is not None and bytes_per_s else None
    return Risk(
        seconds_at_risk=None if durable_at_s is None else max(0.0, now_s - durable_at_s),
        steps_at_risk=None if trainer_step is None else max(0, trainer_step - (durable_step or 0)),
        predicted_flush_s=flush_s,
        fits_grace=None if flush_s is None else flush_s <= grace_s - margin_s(grace_s),
    )
