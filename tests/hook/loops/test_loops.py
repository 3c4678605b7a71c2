"""Each library's example, unchanged, is preempted, loses its volume, and ends with the weights of an uninterrupted run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.hook.job import ROOT, marker, trainer_state
from tests.hook.story import Story, deepspeed, example, steps, told, torchrun, weights
from tests.hook.versions import SHARDS_ON_CPU

pytestmark = pytest.mark.timeout(400)
LAST = 48
DEEPSPEED = ROOT / ".deepspeed"
"""Where the Makefile installs it; an installed one is found as well."""


@dataclass(frozen=True)
class Example:
    command: Callable[[], list[str]]
    needs: str = "torch"
    exit_code: int = 143
    """That of torchrun and of deepspeed is 1."""
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def saves_beside(self) -> bool:
        return bool(self.settings.get("CKPT_ASYNC"))


WIDE = ("--width", "50000")
"""Files that are large enough to be worth a snapshot."""
ASYNC = {"CKPT_ASYNC": "1"}
EXAMPLES = {
    "torch": Example(lambda: example("train_torch.py", *WIDE), settings=ASYNC),
    "accelerate": Example(lambda: example("train_accelerate.py", *WIDE), "accelerate", settings=ASYNC),
    "lightning": Example(lambda: example("train_lightning.py", "--devices", "2", *WIDE), "lightning", settings=ASYNC),
    "sharded": Example(lambda: torchrun("train_fsdp.py"), settings=ASYNC),
    "deepspeed": Example(
        lambda: deepspeed("train_deepspeed.py"), "deepspeed", exit_code=1, settings={"PYTHONPATH": f"{ROOT}:{DEEPSPEED}"}
    ),
}


def case(name: str) -> Any:
    needed = EXAMPLES[name].needs
    there = importlib.util.find_spec(needed) is not None or (DEEPSPEED / needed).is_dir()
    marks = [pytest.mark.skipif(not there, reason=f"{needed} is not installed")]
    if name == "sharded":
        marks.append(SHARDS_ON_CPU)
    return pytest.param(name, marks=marks if name == "torch" else [*marks, pytest.mark.slow])


@pytest.fixture(scope="module", params=[case(name) for name in EXAMPLES])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    tried = EXAMPLES[request.param]
    # Step 20 is in the middle of the second epoch, and of the interval of the periodic saves.
    settings = {"CKPT_SAVE_STEPS": "8"} | tried.settings
    lived = told(tried.command, tmp_path_factory.mktemp("story"), until_step=20, settings=settings)
    assert lived.exit_code == tried.exit_code, lived.first.log()
    return lived


@pytest.mark.slow
def test_a_preempted_run_ends_with_the_weights_of_an_uninterrupted_one(story: Story) -> None:
    stopped_at = steps(story.first)[-1]
    assert story.jit == f"checkpoint-{stopped_at}"
    assert 20 <= stopped_at < 32
    assert steps(story.second) == list(range(stopped_at + 1, LAST + 1)), story.second.log()
    assert steps(story.alone) == list(range(1, LAST + 1))
    assert weights(story.second) == weights(story.alone)


@pytest.mark.slow
def test_what_was_saved_says_why_and_the_end_is_final(story: Story, request: pytest.FixtureRequest) -> None:
    assert (story.store / "checkpoint-16/.complete").exists()
    stopped_at = steps(story.first)[-1]
    assert marker(story.first.volume, story.jit)["reason"] == "jit" or stopped_at % 8 == 0  # in the periodic save
    stopped = trainer_state(story.first.volume)
    assert stopped["state"] == "preempted"
    # Accelerate and DeepSpeed decide themselves which batches end a step.
    knows_last = request.node.callspec.params["story"] not in ("accelerate", "deepspeed")
    assert stopped.get("total_steps") == (LAST if knows_last else None)
    assert marker(story.second.volume, "final")["reason"] == "final"
    assert trainer_state(story.second.volume)["state"] == "succeeded"
    assert "Traceback" not in story.second.log()
    assert story.exit_code != 143 or "Traceback" not in story.first.log()
    assert "[checkpoint] WARNING" not in story.first.log() + story.second.log()


@pytest.mark.slow
def test_saves_beside_training_hold_it_only_for_the_snapshot(story: Story, request: pytest.FixtureRequest) -> None:
    beside = EXAMPLES[request.node.callspec.params["story"]].saves_beside
    assert ("training held for" in story.first.log()) == beside
    assert "blocks training" not in story.first.log()
