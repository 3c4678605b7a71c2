"""Checkpoints that a script writes into the volume by itself: published when complete; other folders are not."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, SCRIPTS, Answers, finished, marker, trainer_state, training
from tests.hook.story import LONG_S
from tests.hook.versions import SAVES_BY_A_PROCESS
from tests.ports import free_port
from tests.process.sidecar_process import until
from trainer_hook.contract import MARKER, META_OWNER, SCRIPT_OWNED
from trainer_hook.libraries.script_saves import hint_for, remove_published
from trainer_hook.volume.checkpoint_folder import listed_files

DEEPSPEED = ROOT / ".deepspeed"
SCRIPT = str(SCRIPTS / "script_saves.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]


def torchrun(what: str) -> list[str]:
    return [*LAUNCHER, f"--master_port={free_port()}", SCRIPT, what]


def expect_published(volume: Path, name: str, *, save_id: str = "1", world_size: int = 2) -> set[str]:
    """Check that a checkpoint is the script's own and that its marker names every file; return their names."""
    told = marker(volume, name)
    assert (told["meta"][META_OWNER], told["save_id"], told["world_size"]) == (SCRIPT_OWNED, save_id, world_size)
    assert told["node"] == {"index": 0, "count": 1}
    assert {file["path"] for file in told["files"]} == {file.path for file in listed_files(volume / name)}
    return {file["path"] for file in told["files"]}


@SAVES_BY_A_PROCESS
@pytest.mark.slow
def test_saves_of_two_ranks_are_published_when_they_are_whole(volume: Path, answers: Answers) -> None:
    with training(torchrun("on_two_ranks"), volume, answers.settings) as running:
        assert running.wait(timeout_s=LONG_S) == 0, running.log()
        log = running.log()
    assert finished(volume) == ["checkpoint-10", "checkpoint-40", "checkpoint-45", "checkpoint-48", "checkpoint-50"], log
    parts = {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert expect_published(volume, "checkpoint-10") == parts | {"extra.json"}, "added after the library's save"
    for name in ("checkpoint-40", "checkpoint-50"):
        assert expect_published(volume, name) == parts
    assert expect_published(volume, "checkpoint-45") == parts - {"__1_0.distcp"}
    # A saver of the hook, inside of which the same library saves, publishes for itself.
    assert META_OWNER not in marker(volume, "checkpoint-48")["meta"]
    assert "published checkpoint-48" not in log
    assert len({marker(volume, name)["attempt"] for name in finished(volume)}) == 1
    assert log.count("async_save done False marked False") == 2
    assert not (volume.parent / "elsewhere/checkpoint-10/.complete").exists()
    assert log.count("global_step20 is not published: the directory of a checkpoint must be named checkpoint-<step>") == 1
    assert log.count("checkpoint-20/model is not published: only the script knows when all of checkpoint-20 is there") == 1
    assert log.count("is not published") == 2
    assert "[checkpoint] WARNING" not in log
    assert not list(volume.glob(".ckpt/ranks/*.done"))
    assert (trainer_state(volume)["state"], trainer_state(volume)["step"]) == ("succeeded", 50)
    assert (volume / ".ckpt/ranks/1.lease").exists()
    assert "POST /v1/flush" in [asked[0] for asked in answers.asked], "the end waits for durability"


@pytest.mark.slow
def test_a_directory_is_saved_again_beside_what_was_published_of_it_and_a_signal_just_ends_the_script(
    volume: Path, answers: Answers
) -> None:
    with training([sys.executable, SCRIPT, "alone"], volume, answers.settings) as running:
        running.said("waits")  # as soon as the second marker is there
        until(lambda: running.log().count("published checkpoint-5, which the script saved") == 2)
        log = running.log()
        assert (trainer_state(volume)["state"], trainer_state(volume)["step"]) == ("running", 5)
        assert running.terminate() == -signal.SIGTERM, "as without the hook"
    assert len(set(re.findall(r"inode (\d+)", log))) == 2, "not written in place: the sidecar holds it by hard links"
    expect_published(volume, "checkpoint-5", save_id="2", world_size=1)
    assert "[checkpoint] WARNING" not in log


@pytest.mark.slow
def test_what_the_scripts_own_handler_saves_or_adds_is_published_before_the_end(volume: Path, answers: Answers) -> None:
    with training([sys.executable, SCRIPT, "with_a_handler"], volume, answers.settings) as running:
        running.said("waits")
        assert running.terminate() == 7, running.log()
        log = running.log()
    assert finished(volume) == ["checkpoint-7", "checkpoint-8"]
    assert "late.json" in expect_published(volume, "checkpoint-7", world_size=1)
    expect_published(volume, "checkpoint-8", world_size=1)
    assert "published checkpoint-7, which the script saved, anew" in log
    assert trainer_state(volume)["state"] == "failed"


@pytest.mark.slow
def test_a_script_that_fails_while_its_first_save_is_being_written_has_failed(volume: Path, answers: Answers) -> None:
    with training([sys.executable, SCRIPT, "fails_beside_a_save"], volume, answers.settings) as running:
        assert running.wait() == 1, running.log()
        assert "ValueError: of the script" in running.log()
    expect_published(volume, "checkpoint-9", world_size=1)
    assert trainer_state(volume)["state"] == "failed"


@SAVES_BY_A_PROCESS
@pytest.mark.slow
def test_a_save_by_another_process_is_published_by_the_one_that_asked(volume: Path, answers: Answers) -> None:
    with training(torchrun("by_a_process"), volume, answers.settings) as running:
        assert running.wait(timeout_s=LONG_S) == 0, running.log()
        assert running.log().count("published checkpoint-10") == 1
        assert "[checkpoint] WARNING" not in running.log()
    assert expect_published(volume, "checkpoint-10") == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None and not DEEPSPEED.is_dir(), reason="deepspeed is not installed"
)
def test_the_tag_of_deepspeed_is_the_name_of_a_checkpoint(volume: Path, answers: Answers) -> None:
    settings = answers.settings | {"PYTHONPATH": f"{ROOT}:{DEEPSPEED}"}
    with training(torchrun("with_deepspeed"), volume, settings) as running:
        assert running.wait(timeout_s=LONG_S) == 0, running.log()
        log = running.log()
    assert finished(volume) == ["checkpoint-1", "checkpoint-2"], log
    for name in finished(volume):
        files = expect_published(volume, name)
        assert sum("optim_states" in path for path in files) == 2
    assert log.count("global_step2 is not published") == 1
    assert "[checkpoint] WARNING" not in log


@pytest.mark.slow
def test_what_accelerate_saves_is_published_whether_one_rank_saves_it_or_all(volume: Path, answers: Answers) -> None:
    with training(torchrun("with_accelerate"), volume, answers.settings) as running:
        assert running.wait(timeout_s=LONG_S) == 0, running.log()
        log = running.log()
    assert finished(volume) == ["checkpoint-1", "checkpoint-2"], log
    assert expect_published(volume, "checkpoint-1") == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    assert "random_states_1.pkl" in expect_published(volume, "checkpoint-2")
    assert log.count("runs/checkpoint-1 is not published: a checkpoint must be directly in $CKPT_DIR") == 1
    assert log.count("is not published") == 1
    assert "[checkpoint] WARNING" not in log
    assert (trainer_state(volume)["state"], trainer_state(volume)["step"]) == ("succeeded", 2)


def test_only_what_is_surely_meant_gets_a_hint() -> None:
    assert "checkpoint-<step>" in str(hint_for(()))
    assert "checkpoint-<step>" in str(hint_for(("checkpoint-007",)))
    assert "checkpoint-7/.complete" in str(hint_for(("checkpoint-7", "model")))
    assert "directly in $CKPT_DIR" in str(hint_for(("runs", "checkpoint-7")))
    # Accelerate's automatic_checkpoint_naming, torchtitan
    for parts in (("checkpoints", "checkpoint_3"), ("checkpoint", "step-20")):
        assert "directly in $CKPT_DIR, named checkpoint-<step>" in str(hint_for(parts))
    assert hint_for(("runs", "model")) is None


def test_making_way_keeps_what_is_newer_than_the_marker(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    remove_published(tmp_path)
    assert (tmp_path / "old").exists(), "nothing was published"
    (tmp_path / MARKER).touch()

    def newer() -> bool:
        (tmp_path / "new").write_text("new")
        return (tmp_path / "new").stat().st_mtime_ns > (tmp_path / MARKER).stat().st_mtime_ns

    until(newer)
    remove_published(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
