"""Grace period that a just-in-time save needs, by the rules of the running sidecar."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.core.lifecycle.phases import margin_s
from sidecar.core.lifecycle.risk import recommended_grace_s, risk
from sidecar.core.lifecycle.save_profile import SaveProfile


@dataclass(frozen=True, slots=True)
class Grace:
    """Seconds from SIGTERM on."""

    save_s: float
    """Rest of the step, agreement of the ranks, and the writing."""
    upload_s: float
    durable_s: float
    """Sum of both."""
    fits: bool
    """Whether that fits into the grace period given."""
    recommended_s: int
    """terminationGracePeriodSeconds and ``CKPT_GRACE_SECONDS``, with room for a slower link."""
    margin_s: float
    """Part of it that is reserved for commit, report and exit."""


def plan_grace(*, save: SaveProfile, bytes_per_s: float, grace_s: float) -> Grace:
    """Return the grace period for a save.

    Args:
        save: Size, duration, step and ranks.
        bytes_per_s: Measured or expected rate, more than 0.
        grace_s: Grace period of the pod as it is now.
    """
    now = risk(seconds_at_risk=None, durable_step=None, trainer_step=None, usual=save, bytes_per_s=bytes_per_s, grace_s=grace_s)
    durable_s = now.predicted_durable_s or 0.0
    recommended_s = recommended_grace_s(durable_s)
    return Grace(
        save_s=now.predicted_save_s or 0.0,
        upload_s=now.predicted_flush_s or 0.0,
        durable_s=durable_s,
        fits=bool(now.fits_grace),
        recommended_s=recommended_s,
        margin_s=margin_s(recommended_s),
    )
