"""The end of an epoch, for a run that resumes there, with a Trainer before transformers 5."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer_hook.libraries.transformers.epoch_start import EpochStart
from trainer_hook.resuming.resumer import Choice


def test_only_a_resumed_pass_without_a_step_restores_the_random_state_and_goes_on(tmp_path: Path) -> None:
    """The end of the epoch before is caught up with first: its evaluation had drawn, and may have ended training."""
    loaded: list[str] = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=1, process_index=0, ignore_data_skip=True),
        state=SimpleNamespace(epoch=0.4),
        _load_rng_state=loaded.append,
    )
    start, caught_up = EpochStart(trainer, tmp_path), SimpleNamespace(should_training_stop=True)
    start.training_begins(Choice("checkpoint-16", tmp_path, {}))
    start.epoch_ends(caught_up)
    assert (loaded, caught_up.should_training_stop) == ([], True)

    control: Any = SimpleNamespace(should_training_stop=False)
    start.epoch_begins(None, control)
    control.should_training_stop = True  # for want of data
    start.epoch_ends(control)
    start.epoch_ends(control)
    assert (loaded, control.should_training_stop) == ([str(tmp_path)], False)
