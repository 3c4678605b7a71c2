"""``CKPT_ASYNC=1``: the writer of asynchronous saves, where it is asked for and possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.asynchronous.snapshot import estimated_bytes
from trainer_hook.process.log import info, warn
from trainer_hook.process.settings import Settings

WHOLE_STATE_ON_ONE_RANK = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Values of accelerate's ``DistributedType`` with which a save is not collective."""


def background_for(settings: Settings, obstacle: str | None, *, ranks: int = 1) -> Background | None:
    """Return the writer of asynchronous saves; ``None``: saves block training.

    ``obstacle``: name of a library or strategy that rules them out. ``ranks``: as for ``Background``.
    """
    if settings.asynchronous and obstacle is not None:
        info(f"CKPT_ASYNC=1 is not available with {obstacle}: saves block training")
    return Background(ranks) if settings.asynchronous and obstacle is None else None


def prepare(background: Background, objects: Sequence[Any]) -> None:
    """Allocate what the first save needs, for the modules, and the optimizers after a step, that this rank saves."""
    if not objects:
        return
    try:
        parameters = (p for thing in objects if hasattr(thing, "parameters") for p in thing.parameters())
        device = next((p.device for p in parameters), None)
        background.prepare(estimated_bytes(*objects), device=device if device is not None and device.type == "cuda" else None)
    except Exception as error:
        warn(f"nothing was prepared for asynchronous saves ({type(error).__name__}: {error})")
