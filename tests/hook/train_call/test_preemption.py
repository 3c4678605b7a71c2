"""A training run survives its pod: periodic saves, a just-in-time save, an exact resume on an empty volume."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hook.conftest import pod
from tests.hook.job import finished, marker, script, trainer_state, training
from trainer_hook.contract import epoch_seconds, parse_marker
from trainer_hook.volume.checkpoint_folder import listed_files

KINDS: dict[str, Any] = {
    "plain": {},
    "gradient accumulation and loader workers": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "dataloader_num_workers": 1,
    },
}
STEPS = 24


@dataclass
class Story:
    """What was seen of one run through two pods."""

    kind: str
    exit_code: int
    stopped_at: int
    sigterm_to_marker_s: float
    first: Any
    second: Any
    state: Any
    finished_first: list[str]
    volume: Path
    said_by_sidecar: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return lived_through("plain", tmp_path_factory.mktemp("story"))


def lived_through(kind: str, path: Path) -> Story:
    """Be preempted, and finish in another pod."""
    arguments = KINDS[kind] | {"max_steps": STEPS}
    slowly, store, volume = script(args=arguments, sleep_s=0.1), path / "store", path / "volume"
    with pod(volume, store) as (sidecar, found), training(slowly, volume, found | {"CKPT_SAVE_STEPS": "8"}) as first:
        first.at_step(11)
        told_s = time.time()
        exit_code = first.terminate()
        stopped_at = first.steps()[-1]
        jit = f"checkpoint-{stopped_at}"
        took_s = epoch_seconds(marker(volume, jit)["created_at"]) - told_s
        sidecar.committed(jit)
        log = sidecar.log()
        held = finished(volume)
        assert sidecar.terminate() == 0
    with pod(path / "empty", store) as (_, found), training(script(args=arguments), path / "empty", found) as second:
        assert second.wait() == 0, second.log()
    state = trainer_state(volume)
    return Story(kind, exit_code, stopped_at, took_s, first, second, state, held, volume, log)


def test_sigterm_ends_training_with_the_code_of_a_preemption(story: Story) -> None:
    assert story.exit_code == 143, story.first.log()
    assert 11 <= story.stopped_at < STEPS


def test_the_checkpoint_of_the_last_step_is_finished_within_a_second(story: Story) -> None:
    print(f"{story.kind}: SIGTERM to marker {story.sigterm_to_marker_s:.3f} s")
    assert story.sigterm_to_marker_s < 1
    assert f"checkpoint-{story.stopped_at}" in story.finished_first


def test_periodic_saves_come_at_their_steps(story: Story) -> None:
    assert "saved checkpoint-8 (periodic" in story.first.log()
    assert marker(story.volume, "checkpoint-8")["reason"] == "periodic"


def test_the_marker_says_what_was_saved_by_whom(story: Story) -> None:
    name = f"checkpoint-{story.stopped_at}"
    said = parse_marker((story.volume / name / ".complete").read_bytes(), name=name)
    assert (said.step, said.reason, said.world_size) == (story.stopped_at, "jit", 1)
    assert said.attempt == marker(story.volume, "checkpoint-8")["attempt"] == story.state["attempt"]
    assert said.node is not None
    assert (said.node.index, said.node.count) == (0, 1)
    assert said.files == listed_files(story.volume / name)
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= {
        file.path for file in said.files
    }
    assert said.meta == {"train_call": 0, "base_step": 0}
    assert said.global_step_seconds is not None
    assert 0.1 < said.global_step_seconds < 1


def test_every_file_can_be_read_by_another_user(story: Story) -> None:
    files = [path for path in (story.volume / "checkpoint-8").rglob("*") if path.is_file()]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files)


def test_trainer_json_says_preempted(story: Story) -> None:
    assert (story.state["state"], story.state["step"], story.state["world_size"]) == ("preempted", story.stopped_at, 1)


def test_trainer_json_has_the_planned_steps_and_the_loss_as_it_was_logged(story: Story) -> None:
    assert story.state["total_steps"] == STEPS
    assert 0 < story.state["loss"] < 100


def test_the_next_pod_goes_on_with_the_next_step(story: Story) -> None:
    assert f"resumes from checkpoint-{story.stopped_at}" in story.second.log()
    assert story.second.steps() == list(range(story.stopped_at + 1, STEPS + 1))


def test_interrupted_and_resumed_gives_the_weights_of_an_uninterrupted_run(story: Story, unhooked: Callable[..., str]) -> None:
    alone = unhooked(args=KINDS[story.kind] | {"max_steps": STEPS})
    assert f"weights {story.second.weights()}" in alone


@pytest.mark.slow
def test_so_it_does_with_gradient_accumulation_and_loader_workers(tmp_path: Path, unhooked: Callable[..., str]) -> None:
    story = lived_through("gradient accumulation and loader workers", tmp_path)
    assert story.exit_code == 143, story.first.log()
    assert story.second.steps() == list(range(story.stopped_at + 1, STEPS + 1))
    test_interrupted_and_resumed_gives_the_weights_of_an_uninterrupted_run(story, unhooked)


def test_a_finished_run_leaves_final_and_says_succeeded(story: Story) -> None:
    empty = story.volume.parent / "empty"
    assert marker(empty, "final")["reason"] == "final"
    assert marker(empty, f"checkpoint-{STEPS}")["step"] == STEPS
    assert trainer_state(empty)["state"] == "succeeded"
    assert "everything is durable" in story.second.log()
    assert (story.volume.parent / "store/final/.complete").exists()


def test_the_hook_speaks_in_single_tidy_lines(story: Story) -> None:
    lines = [line for line in story.first.log().splitlines() if "[checkpoint]" in line]
    assert all(re.match(r"\[checkpoint\] \S", line) for line in lines)
    assert "WARNING" not in story.first.log()
    assert "Traceback" not in story.first.log() + story.second.log()
