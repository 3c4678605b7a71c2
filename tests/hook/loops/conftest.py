"""Trainings that are stopped and go on, each life as a process on the same volume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import Answers
from trainer_hook.contract import step_of
from trainer_hook.volume.checkpoint_folder import finished_on


@pytest.fixture
def environ(answers: Answers, volume: Path) -> dict[str, str]:
    """A trainer's environment: the sidecar offers what is newest on the volume."""

    def newest(asked: Any) -> Any:
        found = [c for c in finished_on(volume) if c.marker.meta.get("train_call", 0) == asked.get("train_call", 0)]
        steps = [c for c in found if step_of(c.name) is not None]
        if not steps:
            return 202, {"state": "none"}
        last = max(steps, key=lambda c: step_of(c.name) or 0)
        return 202, {"state": "ready", "checkpoint": last.name, "source": "local", "meta": dict(last.marker.meta)}

    answers.by_call["POST /v1/resume"] = newest
    return {"CKPT_DIR": str(volume), "CKPT_SAVE_STRATEGY": "no"} | answers.settings
