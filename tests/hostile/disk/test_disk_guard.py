"""A small volume on which a trainer saves faster than the link drains: what is given back, in which order, and what is not."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import Training, popen
from tests.marks import slow
from tests.mounts import small_volume
from tests.ports import free_port
from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint
from trainer_hook.contract import step_of

SAVES = Path(__file__).with_name("saves.py")
MIB = 1 << 20
VOLUME_BYTES = 24 * MIB
SAVE_BYTES = 3 * MIB
SLOW = {"CKPT_BANDWIDTH_LIMIT": "6MB/s", "CKPT_KEEP_LOCAL": "4", "CKPT_GRACE_SECONDS": "60"}
FILE_STORE = pytest.mark.parametrize("place", ["file"], indirect=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A volume of its own, in memory."""
    with small_volume(tmp_path / "small", str(VOLUME_BYTES)) as folder:
        yield folder


@contextmanager
def trainer(running: Sidecar, *arguments: Any, **more: str) -> Iterator[Training]:
    """Run the script under the hook."""
    settings = {"CKPT_API_PORT": str(running.port), "CKPT_GRACE_SECONDS": "60"} | more
    begun = Training([sys.executable, str(SAVES), *map(str, arguments)], running.volume, settings, start=popen)
    try:
        yield begun
    finally:
        if begun.process.poll() is None:
            begun.process.kill()
            begun.process.wait()


def steps(training: Training, word: str) -> list[int]:
    return [int(step) for step in re.findall(rf"^{word} (\d+)$", training.log(), re.MULTILINE)]


def check_no_lack_of_space(training: Training) -> None:
    log = training.log()
    for text in ("No space left", "could not be saved", "Traceback"):
        assert text not in log, log


def check_order(running: Sidecar) -> list[int]:
    """Check that each deletion on the volume is of a durable checkpoint, the oldest there. Return the deleted steps.

    One that became durable within the last half second was not yet in the plan of the deletion.
    """
    durable: dict[int, datetime] = {}
    deleted = []
    for event in running.events():
        step = int(str(event.get("checkpoint", "-0")).rpartition("-")[2] or 0)
        at = datetime.fromisoformat(event["timestamp"])
        if event["event"] == "checkpoint_committed":
            durable[step] = at
        elif event["event"] == "local_checkpoint_deleted":
            assert step in durable, f"{step} was not durable: {event}"
            planned = [each for each, since in durable.items() if each == step or (at - since).total_seconds() > 0.5]
            assert step == min(planned), f"{step} went before {sorted(planned)}"
            del durable[step]
            deleted.append(step)
    return deleted


@FILE_STORE
def test_a_trainer_that_saves_faster_than_the_link_never_lacks_space_and_nothing_undurable_goes(
    small: Path, place: Place, tmp_path: Path
) -> None:
    with sidecar(small, place.settings | SLOW) as running:
        running.ready()
        with trainer(running, 12, SAVE_BYTES, 0.1) as training:
            assert training.wait() == 0, training.log()
            check_no_lack_of_space(training)
        saved, skipped = steps(training, "saved"), steps(training, "skipped")
        assert len(saved) == 12, "more than fit at once"
        assert skipped, "more than the link took"
        assert "saves are skipped" in training.log()
        assert "freed space on the volume" in training.log()
        assert running.terminate() == 0
        assert check_order(running) != []
        kept = {event["checkpoint"] for event in running.events("checkpoint_committed")}
        assert kept == {f"checkpoint-{step}" for step in saved}, "all that was finished is durable"
        assert not running.events("service_failed")
        assert not running.events("upload_defect")
    for step in saved:
        assert (tmp_path / f"store/checkpoint-{step}/.complete").exists()
        assert (tmp_path / f"store/checkpoint-{step}/model").stat().st_size == SAVE_BYTES


@FILE_STORE
@pytest.mark.parametrize("saves_before", [*slow(3), 0])
def test_at_the_notice_durable_checkpoints_make_way_for_the_last_one(
    saves_before: int, small: Path, place: Place, tmp_path: Path
) -> None:
    """The sidecar would keep all. They fill the volume when SIGTERM comes, also to a process that has saved nothing yet."""
    with sidecar(small, place.settings | {"CKPT_KEEP_LOCAL": "9", "CKPT_GRACE_SECONDS": "60"}) as running:
        running.ready()
        until(lambda: running.events("resume_none"), what="no checkpoint is the answer, which would stay")
        for step in range(1, 8 - saves_before):
            write_checkpoint(small, f"checkpoint-{step}", {"model": os.urandom(SAVE_BYTES)}, listed("model", SAVE_BYTES))
            running.committed(f"checkpoint-{step}")
        with trainer(running, saves_before + 1, SAVE_BYTES, 1.0) as training:
            training.said(f"saved {7}" if saves_before else "resumed 7")
            for step in steps(training, "saved"):
                running.committed(f"checkpoint-{step}")
            assert free_bytes(small) < SAVE_BYTES + MIB
            assert training.terminate() == 143, training.log()
            check_no_lack_of_space(training)
        [last] = steps(training, "saved")[saves_before:]
        running.committed(f"checkpoint-{last}")
        assert running.wait() == 0 if running.process.poll() is not None else running.terminate() == 0
        assert check_order(running)[0] == 1


def listed(path: str, size_bytes: int) -> dict[str, Any]:
    return {"files": [{"path": path, "size_bytes": size_bytes}]}


def free_bytes(volume: Path) -> int:
    space = os.statvfs(volume)
    return space.f_bavail * space.f_frsize


@FILE_STORE
def test_room_is_made_of_durable_checkpoints_alone_oldest_first(small: Path, place: Place) -> None:
    with sidecar(small, place.settings | {"CKPT_KEEP_LOCAL": "9", "CKPT_GRACE_SECONDS": "30"}) as running:
        running.ready()
        for step in (1, 2, 3):
            write_checkpoint(small, f"checkpoint-{step}", {"model": os.urandom(SAVE_BYTES)}, {})
            running.committed(f"checkpoint-{step}")
        own = {"meta": {"owner": "script"}}
        write_checkpoint(small, "checkpoint-4", {"model": os.urandom(SAVE_BYTES)}, own)
        running.committed("checkpoint-4")
        running.call("POST", "/v1/bandwidth", {"limit": "100KB/s"})
        write_checkpoint(small, "checkpoint-5", {"model": os.urandom(SAVE_BYTES)}, {})
        write_checkpoint(small, "checkpoint-6", {"model": os.urandom(SAVE_BYTES)}, {})
        until(lambda: len(running.status()["queue"]) == 2)
        one = running.call("POST", "/v1/room", {"bytes": free_bytes(small) + MIB})
        assert one["deleted"] == ["checkpoint-1"]
        assert one["free_bytes"] == free_bytes(small)
        all_ = running.call("POST", "/v1/room", {"bytes": VOLUME_BYTES})
        assert all_["deleted"] == ["checkpoint-2", "checkpoint-3"], "not the script's own, and nothing undurable"
        assert running.call("POST", "/v1/room", {"bytes": 1 << 62})["deleted"] == []
        for nonsense in (-1, 1e400, None, "x"):
            assert running.call("POST", "/v1/room", {"bytes": nonsense})["http_status"] in (400, 422)
        assert {path.name for path in small.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-5", "checkpoint-6"}
        running.call("POST", "/v1/bandwidth", {"limit": None})
        running.committed("checkpoint-6")
        running.committed("checkpoint-5")
        assert running.terminate() == 0
    assert check_order(running) == [1, 2, 3]


@FILE_STORE
def test_a_resume_that_does_not_fit_fails_and_names_the_volume_and_fits_once_there_is_space(
    small: Path, place: Place, tmp_path: Path
) -> None:
    files = {f"model-{n}": os.urandom(4 * MIB) for n in range(4)}
    with sidecar(tmp_path / "first", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"model": b"small"}, {})
        running.committed("checkpoint-1")
        write_checkpoint(running.volume, "checkpoint-2", files, {})
        running.committed("checkpoint-2")
    (small / "other").write_bytes(bytes(12 * MIB))
    with sidecar(small, place.settings | {"CKPT_RESUME": "on-demand"}) as running:
        answer = running.ready().resume()
        assert answer["state"] == "failed", "an older step is not taken silently because a disk is full"
        assert answer["detail"].startswith("checkpoint-2: No space left on device (16777216 bytes are to be downloaded, ")
        assert "free space on the volume or make it larger" in answer["detail"]
        assert free_bytes(small) > 8 * MIB, "the space is the trainer's"
        assert not list(small.glob("checkpoint-*"))
        write_checkpoint(small, "checkpoint-3", {"model": b"also small"}, {})
        running.committed("checkpoint-3")  # it lives, and what fits is sent
        (small / "checkpoint-3/.complete").unlink()
        (small / "other").unlink()
        again = running.resume("checkpoint-2")
        assert (again["state"], again["checkpoint"]) == ("ready", "checkpoint-2")
        assert contents(small / "checkpoint-2") == files


@FILE_STORE
def test_for_a_resume_durable_checkpoints_leave_the_volume_oldest_first(small: Path, place: Place, tmp_path: Path) -> None:
    files = {f"model-{n}": os.urandom(4 * MIB) for n in range(4)}
    with sidecar(tmp_path / "first", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-20", files, {})
        running.committed("checkpoint-20")
    with sidecar(small, place.settings | {"CKPT_RESUME": "on-demand", "CKPT_KEEP_LOCAL": "9"}) as running:
        running.ready()
        for step in (1, 2, 3, 4):
            write_checkpoint(small, f"checkpoint-{step}", {"model": os.urandom(SAVE_BYTES)}, {})
            running.committed(f"checkpoint-{step}")
        assert running.resume()["checkpoint"] == "checkpoint-20"
        assert contents(small / "checkpoint-20") == files
        [event] = running.events("resume_made_room")
        assert event["deleted"] == ["checkpoint-1", "checkpoint-2"]
        assert {path.name for path in small.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4", "checkpoint-20"}
        assert check_order(running) == [1, 2]


def rotate(running: Sidecar, *, steps: int) -> None:
    """Save as a script does that keeps two checkpoints, and check that there is space for the next each time."""
    volume = running.volume
    for step in range(1, steps + 1):
        write_checkpoint(volume, f"checkpoint-{step}", {"model": os.urandom(SAVE_BYTES)}, listed("model", SAVE_BYTES))
        if step > 2:
            shutil.rmtree(volume / f"checkpoint-{step - 2}")
        until(lambda step=step: f"checkpoint-{step}" in finished(running), what=f"step {step} is seen")
        until(lambda: free_bytes(volume) > SAVE_BYTES, what="space for the next")


def test_a_script_that_rotates_its_checkpoints_finds_space_for_the_next_where_no_store_was_ever_reached(small: Path) -> None:
    nowhere = {"CKPT_STORE": "s3://bucket/run", "AWS_S3_ENDPOINT": f"http://127.0.0.1:{free_port()}", "CKPT_GRACE_SECONDS": "5"}
    with sidecar(small, nowhere | {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}) as running:
        running.up()
        rotate(running, steps=12)
        assert running.terminate() == 3
        assert "checkpoint-12" in {each["checkpoint"] for each in running.report["given_up"]}


@FILE_STORE
def test_a_script_that_rotates_its_checkpoints_finds_space_for_the_next_while_the_store_takes_none(
    small: Path, place: Place
) -> None:
    """Hard links of the sidecar alone hold what the script has deleted: the oldest of it goes, and the newest never."""
    with sidecar(small, place.settings | {"CKPT_BANDWIDTH_LIMIT": "1KB/s"}) as running:
        running.ready()
        rotate(running, steps=12)
        given_up = [event["checkpoint"] for event in running.events("checkpoint_superseded")]
        assert given_up == sorted(given_up, key=step_of), "of those that were not being sent the oldest first"
        assert 5 <= len(given_up) <= 7, "no more than had to"
        running.call("POST", "/v1/bandwidth", {"limit": None})
        for name in {f"checkpoint-{step}" for step in range(1, 13)} - set(given_up):
            running.committed(name)
        assert running.terminate() == 0


def finished(running: Sidecar) -> list[str]:
    return [event["checkpoint"] for event in running.events("checkpoint_finished")]


@FILE_STORE
def test_saves_that_fail_on_a_full_volume_are_said_by_the_sidecar_until_they_succeed_again(small: Path, place: Place) -> None:
    (small / "other").write_bytes(bytes(VOLUME_BYTES - SAVE_BYTES))
    with sidecar(small, place.settings) as running:
        running.ready()
        with trainer(running, 2, SAVE_BYTES, 0.2) as training:
            [event] = until(lambda: running.events("trainer_saves_fail"), what=training.log)
            assert "no finished checkpoint is on the volume; it takes more than" in event["error"]
            assert running.status()["trainer"]["save_error"] == event["error"]
            assert f"saves fail {event['error'][:60]}" in running.command("status").stdout
            (small / "other").unlink()
            until(lambda: running.events("trainer_saves_again"), what=training.log)
            assert training.wait() == 0, training.log()
        assert running.status()["trainer"]["save_error"] is None
        assert len(running.events("trainer_saves_fail")) == len(running.events("trainer_saves_again")) == 1
        assert running.terminate() == 0
