"""Saves of one rank: which are tried again, and what rotation may delete."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mounts import small_volume
from tests.ports import free_port
from trainer_hook import contract
from trainer_hook.process.client import Client
from trainer_hook.process.save_requests import SaveRequests
from trainer_hook.process.session import Session
from trainer_hook.process.settings import from_environment
from trainer_hook.process.signals import StopSignal
from trainer_hook.saving import step_monitor, step_saver
from trainer_hook.saving.step_monitor import StepMonitor
from trainer_hook.saving.step_saver import StepSaver, StepWriter
from trainer_hook.train_call.train_call import TrainCall
from trainer_hook.volume.checkpoint_folder import finish, finished_on
from trainer_hook.volume.publish import make_system_folders


class Writer(StepWriter):
    """Writes one file, or fails."""

    def __init__(self) -> None:
        self.fails = False
        self.tries = 0
        self.failing_tries: set[int] = set()
        self.written: list[str] = []

    def write(self, folder: Path) -> None:
        self.tries += 1
        if self.fails or self.tries in self.failing_tries:
            raise OSError("no space left on device")
        folder.mkdir()
        (folder / "model").write_bytes(b"weights")
        self.written.append(folder.name)

    def write_final(self, folder: Path) -> None:
        self.write(folder)


@pytest.fixture
def writer() -> Writer:
    return Writer()


def saver_on(volume: Path, writer: Writer, **settings: str) -> StepSaver:
    read = from_environment({"CKPT_DIR": str(volume), "CKPT_SIDECAR_URL": f"http://127.0.0.1:{free_port()}", **settings})
    make_system_folders(volume)
    stop = StopSignal(volume, exit_code=read.preempted_exit_code, grace_s=read.grace_seconds)
    session = Session(read, stop, SaveRequests(volume), Client(read.sidecar_url, volume), attempt="now")
    return StepSaver(session, writer)


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_notice_from_before_training_limits_the_wait_for_other_ranks(
    tmp_path: Path, writer: Writer, is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = saver_on(tmp_path, writer)._session
    watched: list[Session] = []
    monkeypatch.setattr(step_monitor, "exit_if_ranks_hang", watched.append)
    if is_noticed:
        session.stop.notice_at_s = time.monotonic() - 5.0
        assert session.stop.left_s() == pytest.approx(25.0, abs=1.0)
    StepMonitor(session).begin(0)
    assert watched == [session] * is_noticed


def test_after_a_call_a_notice_ends_no_wait_for_other_ranks(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_on(tmp_path, writer)
    watched: list[Session] = []
    monkeypatch.setattr(step_monitor, "exit_if_ranks_hang", watched.append)
    StepMonitor(saver._session).begin(0)
    call = TrainCall.__new__(TrainCall)
    call.session, call.saver = saver._session, saver
    call.close()
    saver._session.stop._notice_signal()
    assert watched == []


def finished(volume: Path) -> set[str]:
    return {checkpoint.name for checkpoint in finished_on(volume)}


def saved_before(volume: Path, *steps: int) -> None:
    for step in steps:
        folder = volume / f"checkpoint-{step}"
        folder.mkdir()
        finish(folder, contract.Marker(step=step, attempt="before"))


def test_a_step_is_saved_once(tmp_path: Path, writer: Writer) -> None:
    saver = saver_on(tmp_path, writer)
    assert all(saver.save(5, reason) for reason in ("periodic", "manual", "jit"))
    assert writer.written == ["checkpoint-5"]


@pytest.mark.parametrize(("left_s", "tries"), [(25.0, 2), (0.1, 1)])
def test_a_just_in_time_save_that_failed_is_tried_once_more_if_there_is_time(
    tmp_path: Path, writer: Writer, left_s: float, tries: int
) -> None:
    saver = saver_on(tmp_path, writer)
    saver._session.stop.notice_at_s = time.monotonic() - (30.0 - left_s)
    writer.failing_tries = {1}
    assert saver.save_just_in_time(5) == (tries == 2)
    assert writer.tries == tries
    assert len(finished(tmp_path)) == tries - 1
    assert list(saver._session.not_saved) == ["checkpoint-5"] * (2 - tries)


def test_a_just_in_time_save_is_tried_once_more_where_its_folder_could_not_be_made(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_on(tmp_path, writer)
    saver._session.stop.notice_at_s = time.monotonic()
    refused: list[Path] = []

    def check_writable(folder: Path) -> None:
        if not refused:
            refused.append(folder)
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(step_saver, "check_writable", check_writable)
    assert saver.save_just_in_time(5)
    assert (finished(tmp_path), len(refused), saver._session.not_saved) == ({"checkpoint-5"}, 1, {})


def test_a_just_in_time_save_that_fails_twice_is_given_up(tmp_path: Path, writer: Writer) -> None:
    saver = saver_on(tmp_path, writer)
    saver._session.stop.notice_at_s = time.monotonic()
    writer.fails = True
    assert not saver.save_just_in_time(5)
    assert writer.tries == 2


def test_a_rank_that_died_during_the_just_in_time_save_raises_nothing_in_the_others(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_on(tmp_path, writer)
    saver._session.stop.notice_at_s = time.monotonic()

    def agree(yes: bool) -> bool:
        if writer.written:
            raise RuntimeError("Connection closed by peer")
        return yes

    monkeypatch.setattr(saver._consensus, "all_agree", agree)
    assert saver.save_just_in_time(5)
    assert writer.tries == 1


@pytest.mark.parametrize("again", ["periodic", "manual", "jit"])
def test_a_save_that_failed_is_not_said_to_be_there_and_is_tried_again(tmp_path: Path, writer: Writer, again: str) -> None:
    saver = saver_on(tmp_path, writer)
    writer.fails = True
    assert not saver.save(5, "periodic")
    assert not saver.save(5, again)
    assert list(saver._session.not_saved) == ["checkpoint-5"]
    writer.fails = False
    assert saver.save(5, again)
    assert not saver._session.not_saved
    assert finished(tmp_path) == {"checkpoint-5"}


def test_an_error_of_torchs_sharded_save_does_not_stop_training(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no ``Exception``. Trainer, Lightning and Accelerate save so with FSDP."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    saver = saver_on(tmp_path, writer)

    def write(folder: Path) -> None:
        raise checkpoint.CheckpointException("write", {0: (OSError("no space left on device"), None)})

    monkeypatch.setattr(writer, "write", write)
    assert not saver.save(5, "periodic")
    assert not saver.save(6, "jit")
    saver.save_final(6)
    assert list(saver._session.not_saved) == ["checkpoint-5", "checkpoint-6", "final"]
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("[checkpoint] ") for line in lines), "one line each"
    assert sum("no space left on device" in line for line in lines) == 3


def test_a_signal_in_a_save_ends_the_process(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = saver_on(tmp_path, writer)

    def write(folder: Path) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(writer, "write", write)
    with pytest.raises(SystemExit):
        saver.save(5, "periodic")


def test_a_save_that_was_skipped_for_want_of_space_is_tried_just_in_time(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_on(tmp_path, writer)
    monkeypatch.setattr(saver._admission, "fits", lambda expected_bytes: False)
    assert not saver.save(5, "periodic")
    assert saver.save(5, "jit")
    assert finished(tmp_path) == {"checkpoint-5"}


def test_a_volume_that_is_gone_is_not_made_anew(tmp_path: Path, writer: Writer) -> None:
    """The folder would be in the container's own file system, and look like the volume."""
    volume = tmp_path / "volume"
    volume.mkdir()
    saver = saver_on(volume, writer)
    shutil.rmtree(volume)
    assert not saver.save(5, "periodic")
    assert not saver.save(6, "jit")
    saver.save_final(7)
    assert not volume.exists()
    assert list(saver._session.not_saved) == ["checkpoint-5", "checkpoint-6", "final"]


@pytest.mark.parametrize("what", ["mkdir", "write_bytes"])
def test_a_volume_that_became_read_only_is_found_before_the_ranks_write_together(
    tmp_path: Path, writer: Writer, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error inside the write would leave the other ranks waiting in the collectives of a sharded save."""
    saver = saver_on(tmp_path, writer)
    votes, began = list[bool](), list[Path]()
    agree, write, original = saver._consensus.all_agree, writer.write, getattr(Path, what)

    def vote(yes: bool) -> bool:
        votes.append(yes)
        return agree(yes)

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        if "checkpoint-5" in path.parts:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(saver._consensus, "all_agree", vote)
    monkeypatch.setattr(writer, "write", lambda folder: (began.append(folder), write(folder)))
    with monkeypatch.context() as during:
        during.setattr(Path, what, refused)
        assert not saver.save(5, "periodic")
    assert (votes, began, finished(tmp_path)) == ([False], [], set())
    assert not (tmp_path / "checkpoint-5").exists()
    assert saver.save(5, "periodic")
    assert finished(tmp_path) == {"checkpoint-5"}


def test_rotation_leaves_the_step_that_was_just_saved_after_training_went_back(tmp_path: Path, writer: Writer) -> None:
    saver = saver_on(tmp_path, writer, CKPT_SAVE_TOTAL_LIMIT="2")
    saved_before(tmp_path, 100, 200, 300)
    saver._session.continues_from("checkpoint-100", attempt="before")
    assert saver.save(143, "jit")
    assert finished(tmp_path) == {"checkpoint-100", "checkpoint-143"}


def test_rotation_leaves_what_another_run_left_on_the_volume(tmp_path: Path, writer: Writer) -> None:
    """Steps of another run are higher than those of a new one, and counted as abandoned: they went first."""
    saver = saver_on(tmp_path, writer, CKPT_SAVE_TOTAL_LIMIT="1")
    saved_before(tmp_path, 50, 60)
    status = (tmp_path / "checkpoint-50" / contract.MARKER).stat()
    version = contract.version_of(status.st_ino, status.st_size, status.st_mtime_ns)
    (tmp_path / contract.RUNS).write_text(json.dumps({"runs": [{"store": "b"}, {"store": "a", "versions": [version]}]}))
    assert saver.save(2, "periodic")
    assert saver.save(3, "periodic")
    assert finished(tmp_path) == {"checkpoint-50", "checkpoint-3"}


def test_a_checkpoint_that_cannot_be_deleted_costs_no_other_one(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = saver_on(tmp_path, writer, CKPT_SAVE_TOTAL_LIMIT="1")
    saved_before(tmp_path, 1)

    def remove(folder: Path) -> None:
        if folder.name == "checkpoint-1":
            raise PermissionError(13, "Permission denied", str(folder))
        shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(step_saver, "remove_wholly", remove)
    assert saver.save(2, "periodic")
    assert saver.save(3, "periodic")
    assert finished(tmp_path) == {"checkpoint-1", "checkpoint-3"}
    assert "checkpoint-1 could not be deleted: [Errno 13] Permission denied" in capsys.readouterr().err


def test_an_error_of_torch_on_a_full_volume_says_that_it_is_full(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch says ``unexpected pos 64 vs 0``, or ``iostream error``."""
    torch = pytest.importorskip("torch")

    def write(folder: Path) -> None:
        folder.mkdir()
        torch.save(torch.zeros(1 << 20), folder / "model.pt")

    monkeypatch.setattr(writer, "write", write)
    with small_volume(tmp_path / "small", "3m") as volume:
        saver = saver_on(volume, writer)
        assert not saver.save(5, "jit")
        assert not (volume / "checkpoint-5").exists()
        saver.save_final(5)
    assert capsys.readouterr().err.count(" could not be saved (the volume is full: RuntimeError: ") == 2


def filling(folder: Path, size_bytes: int = 3 << 20) -> None:
    """Write more than a small volume takes."""
    folder.mkdir(parents=True)
    with (folder / "model").open("wb", buffering=0) as file:
        for _ in range(size_bytes >> 16):
            if file.write(bytes(1 << 16)) < 1 << 16:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told_error(volume: Path) -> str | None:
    return contract.parse_trainer_state((volume / contract.TRAINER_STATE).read_bytes()).save_error


def test_a_volume_on_which_nothing_fits_is_said_with_what_a_save_takes_and_the_next_step(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = writer.write
    monkeypatch.setattr(writer, "write", filling)
    with small_volume(tmp_path / "small", "2m") as volume:
        saver = saver_on(volume, writer)
        assert not saver.save(5, "periodic")
        said = capsys.readouterr().err
        assert "checkpoint-5 could not be saved (OSError: [Errno 28] No space left on device); " in said
        assert "; no finished checkpoint is on the volume; it takes more than 2.1 MB, " in said
        assert " MB are free: enlarge the volume (sizeLimit of the emptyDir, storage of the PVC)\n" in said
        assert "stand" not in said
        assert told_error(volume) in said
        monkeypatch.setattr(writer, "write", usual)
        assert saver.save(6, "periodic")
        assert told_error(volume) is None
        saver._last_bytes = 0  # so that it is tried
        monkeypatch.setattr(writer, "write", filling)
        assert not saver.save(7, "periodic")
        said = capsys.readouterr().err
        assert "; checkpoint-6 stands; it takes more than" in said
        assert "or keep fewer checkpoints on it (CKPT_KEEP_LOCAL, CKPT_SAVE_TOTAL_LIMIT)\n" in said


def test_a_save_that_fails_for_another_reason_says_what_stands_and_nothing_of_space(
    tmp_path: Path, writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = saver_on(tmp_path, writer)
    writer.failing_tries = {1}
    assert not saver.save(5, "periodic")
    assert capsys.readouterr().err.endswith(
        "could not be saved (OSError: no space left on device); no finished checkpoint is on the volume\n"
    )


def test_a_quota_is_told_from_a_full_volume(tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(writer, "write", write)
    monkeypatch.setattr(writer, "expected_bytes", lambda: 4_200_000)
    saver = saver_on(tmp_path, writer)
    assert not saver.save(5, "periodic")
    assert "it takes about 4.2 MB, " in (told_error(tmp_path) or "")
    assert (told_error(tmp_path) or "").endswith(" are free on the volume: raise this user's quota there")


def test_saves_that_are_skipped_for_space_are_told_to_the_sidecar(tmp_path: Path, writer: Writer) -> None:
    saver = saver_on(tmp_path, writer)
    saver._last_bytes = 1 << 60
    assert not saver.save(5, "periodic")
    assert (told_error(tmp_path) or "").startswith("saves are skipped: ")
    assert "1.15e+06 TB" in (told_error(tmp_path) or "")
