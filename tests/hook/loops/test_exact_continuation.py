"""A loop continues exactly, wherever it is stopped: its weights are those of an uninterrupted run.

Each life is a forked process on the same volume that sends SIGTERM to itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hook.job import finished, marker
from tests.lazy import LazyModule

trainings = LazyModule("tests.hook.loops.short_trainings")
PER_EPOCH, EPOCHS = 6, 3
"""Steps of an epoch, and epochs, of each training."""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    trainings.imported_once()


LIBRARY = {"stateful": "torchdata", "lightning_by_its_older_name": "pytorch_lightning", "accelerated": "accelerate"}
IN_VALIDATION = ("lightning_in_a_validation", "lightning_in_validations_by_the_way")
LIBRARY |= dict.fromkeys(("lightning", "lightning_validating_often", "lightning_by_steps", *IN_VALIDATION), "lightning.pytorch")
PLACES: list[tuple[str, tuple[int, ...]]] = [
    ("shuffled", (1, 4, PER_EPOCH, 2 * PER_EPOCH - 1)),
    ("hard_to_save", (PER_EPOCH + 2,)),
    ("shuffled_by_its_own_generator", (8,)),
    ("with_workers", (PER_EPOCH, 8)),
    ("with_persistent_workers", (PER_EPOCH + 2, 2 * PER_EPOCH)),
    ("streamed", (8,)),
    ("stateful", (4, PER_EPOCH, PER_EPOCH + 1)),
    ("by_steps_alone", (4, PER_EPOCH + 2)),
    ("accumulating", (PER_EPOCH, 8)),
    ("stepping_itself", (5,)),
    ("accelerated", (PER_EPOCH, 8)),
    ("lightning", (4, PER_EPOCH, PER_EPOCH + 2)),
    ("lightning_validating_often", (4, 5, PER_EPOCH, 8)),
    ("lightning_in_a_validation", (PER_EPOCH, EPOCHS * PER_EPOCH)),
    ("lightning_in_validations_by_the_way", (4, PER_EPOCH, 2 * PER_EPOCH + 2)),
    ("lightning_by_steps", (PER_EPOCH - 1, PER_EPOCH)),
    ("lightning_by_its_older_name", (8,)),
]
ALWAYS = ("shuffled", "hard_to_save", "accelerated", "lightning_in_a_validation")


@pytest.mark.parametrize(
    ("training", "stops"),
    [pytest.param(*place, id=place[0], marks=[] if place[0] in ALWAYS else pytest.mark.slow) for place in PLACES],
)
def test_a_run_that_is_stopped_anywhere_ends_as_if_it_was_not(
    training: str, stops: tuple[int, ...], environ: dict[str, str], volume: Path
) -> None:
    if training in LIBRARY:
        pytest.importorskip(LIBRARY[training])
    code, expected = trainings.life(training, None, {"CKPT_DIR": ""})
    assert code == 0
    assert expected
    for stop_at in stops:
        assert trainings.life(training, stop_at, environ)[0] == 143
    assert len(finished(volume)) == len(stops)
    assert marker(volume, finished(volume)[0])["reason"] == "jit"
    if training in IN_VALIDATION:
        left = [json.loads(path.read_text()).get("unfinished") for path in volume.glob("checkpoint-*/progress.json")]
        assert left == [["validation"]] * len(stops)
    assert trainings.life(training, None, environ) == (0, expected)


def test_one_that_was_killed_before_it_wrote_the_final_model_writes_it_in_its_next_life(
    environ: dict[str, str], volume: Path
) -> None:
    """Its last checkpoint says that training has ended: the next life succeeded, and there never was a final model."""
    assert trainings.life("killed_in_its_end", None, environ)[0] == 9
    assert finished(volume) == [f"checkpoint-{EPOCHS * PER_EPOCH}"]
    code, weights = trainings.life("shuffled", None, environ)
    assert code == 0
    assert weights
    assert set(finished(volume)) == {f"checkpoint-{EPOCHS * PER_EPOCH}", "final"}
