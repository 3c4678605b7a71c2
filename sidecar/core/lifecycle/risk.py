"""Time at risk: the loss if the pod were killed now, and whether a just-in-time save would fit into the grace period."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sidecar.core.lifecycle.phases import margin_s
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.lifecycle.store_state import StoreState
from sidecar.core.schedule.throughput import TELLING_BYTES

SLOWEST = 1.0
"""Lower bound of the rate in bytes per second, so that predictions stay finite."""
AGREE_S = 1.0
"""Seconds that several ranks may need to agree to stop."""
ROOM = 1.25
"""Recommended grace period, as a multiple of the prediction."""
CALM = 0.9
"""Hysteresis: a save that did not fit is reported to fit again only below this share of the time, because rates vary."""


@dataclass(frozen=True, slots=True)
class Risk:
    """Cost of a kill at this instant, in seconds and steps, and duration of a save. ``None``: not known yet."""

    seconds_at_risk: float | None
    steps_at_risk: int | None
    store: StoreState
    predicted_save_s: float | None
    """Seconds from SIGTERM until the trainer has finished a checkpoint: rest of the step, and duration of the latest save."""
    predicted_flush_s: float | None
    """Seconds to upload its bytes at the measured rate. Early upload, while it is being written, makes it shorter."""
    predicted_durable_s: float | None
    """Sum of both, in seconds."""
    upload_bytes_per_s: float | None
    """The measured rate; ``None``: checkpoints are so small that they measure the store's latency."""
    fits_grace: bool | None
    """Whether a save at SIGTERM would be durable in time. Known only while the store answers, or certainly cannot be used."""
    advice: str | None
    """Remedy if it does not fit while the store answers; ``None``: it fits, or is not known."""


def risk(
    *,
    seconds_at_risk: float | None,
    durable_step: int | None,
    trainer_step: int | None,
    usual: SaveProfile | None,
    bytes_per_s: float | None,
    grace_s: float,
    store: StoreState = StoreState.ANSWERS,
    limited: bool = False,
) -> Risk:
    """Return the risk.

    Args:
        seconds_at_risk: Seconds of training since the newest durable state was saved; ``None``: unknown.
        durable_step: Step of the newest durable state.
        trainer_step: Current step of the trainer; while nobody trains, the newest finished one.
        usual: Profile of the latest save.
        bytes_per_s: Measured rate.
        grace_s: Grace period in seconds.
        store: State of the store. Unless it answers, no time until durable is predicted.
        limited: ``CKPT_BANDWIDTH_LIMIT`` is set.
    """
    save_s, answers = _save_s(usual), store is StoreState.ANSWERS
    flush_s = upload_s(usual.size_bytes, bytes_per_s) if usual is not None and bytes_per_s and answers else None
    durable_s = None if flush_s is None else (save_s or 0.0) + flush_s
    fits = None if durable_s is None else durable_s <= grace_s - margin_s(grace_s)
    steps = None if trainer_step is None else max(0, trainer_step - (durable_step or 0))
    return Risk(
        seconds_at_risk=0.0 if steps == 0 else seconds_at_risk,
        steps_at_risk=steps,
        store=store,
        predicted_save_s=save_s,
        predicted_flush_s=flush_s,
        predicted_durable_s=durable_s,
        upload_bytes_per_s=bytes_per_s if usual is not None and usual.size_bytes >= TELLING_BYTES else None,
        fits_grace=fits if store.is_usable else False,
        advice=_advice(durable_s, limited=limited) if durable_s is not None and not fits else None,
    )


def fits_now(before: bool | None, now: Risk, *, grace_s: float) -> bool | None:
    """Return whether a save fits, with hysteresis (``CALM``); ``None``: not known yet. A store that is away changes nothing."""
    if now.predicted_durable_s is None:
        return before
    if before is False and now.fits_grace:
        return now.predicted_durable_s <= CALM * (grace_s - margin_s(grace_s))
    return now.fits_grace


def upload_s(size_bytes: int, bytes_per_s: float) -> float:
    """Return the seconds that an upload takes at a measured rate."""
    return size_bytes / max(bytes_per_s, SLOWEST)


def recommended_grace_s(durable_s: float) -> int:
    """Return the grace period in whole seconds in which a save that is durable after ``durable_s`` fits, with ``ROOM``."""
    return math.ceil(ROOM * durable_s + margin_s(ROOM * durable_s))


def _save_s(usual: SaveProfile | None) -> float | None:
    if usual is None or usual.took_s is None:
        return None
    return (usual.step_seconds or 0.0) + (AGREE_S if usual.ranks > 1 else 0.0) + usual.took_s


def _advice(durable_s: float, *, limited: bool) -> str:
    faster = "lift CKPT_BANDWIDTH_LIMIT" if limited else "raise CKPT_CONCURRENCY if the link has room"
    return (
        f"raise terminationGracePeriodSeconds and CKPT_GRACE_SECONDS to {recommended_grace_s(durable_s)}; or {faster}, "
        "or save fewer bytes; or save more often, so that less is lost when it does not fit"
    )
