"""``CKPT_ASYNC=1``: what writes saves beside training, for those who may use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.asynchronous.snapshot import estimated_bytes
from trainer_hook.process.log import info, warn
from trainer_hook.process.settings import Settings


def background_for(settings: Settings, obstacle: str | None, *, ranks: int = 1) -> Background | None:
    """Return what writes beside training, if the settings ask for it.

    Args:
        settings: Of this process.
        obstacle: With what it is not available, if so.
        ranks: How many on this node take a snapshot at the same time.
    """
    if not settings.asynchronous:
        return None
    if obstacle is not None:
        info(f"CKPT_ASYNC=1 is not available with {obstacle}: saves block training")
        return None
    return Background(ranks)


def prepare(background: Background, objects: Sequence[Any]) -> None:
    """Take what the first save will need while training goes on.

    Args:
        background: What writes.
        objects: Modules, and optimizers that have their state: what this rank will save of them. Nothing is no matter.
    """
    if not objects:
        return
    try:
        parameters = (p for thing in objects if hasattr(thing, "parameters") for p in thing.parameters())
        device = next((p.device for p in parameters), None)
        background.prepare(estimated_bytes(*objects), device=device if device is not None and device.type == "cuda" else None)
    except Exception as error:
        warn(f"nothing was prepared for saves beside training ({type(error).__name__}: {error})")
