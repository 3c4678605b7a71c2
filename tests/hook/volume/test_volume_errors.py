"""What the hook does on its volume, with each call to the file system failing once: nothing is lost or mistaken."""

from __future__ import annotations

import errno
import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.hook.resuming.test_resumer import Asked, none_missing
from tests.simulation.volume_errors import FailingCall
from trainer_hook.contract import (
    RUNS,
    TERMINATING,
    TRAINER_STATE,
    Marker,
    RequestFile,
    encode_json,
    encode_request,
    parse_notice,
    parse_trainer_state,
    version_of,
)
from trainer_hook.process import earlier_scripts
from trainer_hook.process.client import Client
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.process.save_requests import SaveRequests
from trainer_hook.process.session import Session
from trainer_hook.process.settings import from_environment
from trainer_hook.process.signals import StopSignal
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.saving.step_saver import StepSaver, StepWriter
from trainer_hook.volume import lease, retry
from trainer_hook.volume.checkpoint_folder import finish, finished_on
from trainer_hook.volume.publish import make_system_folders

NUMBERS = [errno.EIO, errno.ESTALE]
MOST = 100
"""No case makes more calls."""


class Case:
    """An operation on a volume, with the files that it starts with and a check of the files that it leaves."""

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        make_system_folders(volume)

    def act(self) -> Any:
        raise NotImplementedError

    def check(self, result: Any) -> None:
        raise NotImplementedError

    def session(self) -> Session:
        settings = from_environment({"CKPT_DIR": str(self.volume)})
        stop, client = StopSignal(self.volume, exit_code=143), Client("http://127.0.0.1:9", self.volume)
        session = Session(settings, stop, SaveRequests(self.volume), client)
        session.consensus = RankConsensus()
        session.world, session.attempt = session.consensus.world, "a1"
        return session


class Writer(StepWriter):
    def write(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model").write_bytes(b"weights")

    write_final = write


class FinalWriter(Writer):
    def write_final(self, folder: Path) -> None:
        retry.retried(functools.partial(self.write, folder))


class LeaseIsTaken(Case):
    def act(self) -> None:
        session = self.session()
        world, session.world = session.world, None
        assert world is not None
        session.take_part(world, "a1")

    def check(self, result: Any) -> None:
        held = lease._held.pop(str(self.volume / ".ckpt/ranks/0.lease"), None)
        assert held is not None
        os.close(held)


class SuccessIsTold(Case):
    """A classic sidecar ends its pod by it."""

    def act(self) -> None:
        self.session().tell_state("succeeded", 5)

    def check(self, result: Any) -> None:
        assert parse_trainer_state((self.volume / TRAINER_STATE).read_bytes()).state == "succeeded"


class NoticeIsTold(Case):
    def act(self) -> None:
        StopSignal(self.volume, exit_code=143)._notice_signal()

    def check(self, result: Any) -> None:
        assert parse_notice((self.volume / TERMINATING).read_bytes()) is not None


class StepIsNotDisturbed(Case):
    """A step ends with a look for a notice, which is usually not there."""

    def act(self) -> Any:
        return StopSignal(self.volume, exit_code=143).noticed()

    def check(self, result: Any) -> None:
        assert result is False


class RequestOfAnEarlierProcessIsIgnored(Case):
    def __init__(self, volume: Path) -> None:
        super().__init__(volume)
        (volume / ".ckpt/request.json").write_bytes(encode_request(RequestFile("r1", "save-and-stop")))

    def act(self) -> Any:
        requests = SaveRequests(self.volume)
        return [requests.take() for _ in range(3)]

    def check(self, result: Any) -> None:
        assert result == [None] * 3


class ScriptBeforeIsKnown(Case):
    """Else a script resumes from the checkpoints of another one."""

    def act(self) -> Any:
        earlier_scripts.record(self.volume, calls=1, steps=20, attempt="a1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(earlier_scripts, "_this_script", lambda: "next.py")
            return earlier_scripts.last_ended(self.volume)

    def check(self, result: Any) -> None:
        assert (result.calls, result.steps) == (1, 20)


class CheckpointOfAnotherRunIsNotUsed(Case):
    def __init__(self, volume: Path) -> None:
        super().__init__(volume)
        (volume / "checkpoint-5").mkdir()
        finish(volume / "checkpoint-5", Marker(step=5))
        status = (volume / "checkpoint-5/.complete").stat()
        theirs = version_of(status.st_ino, status.st_size, status.st_mtime_ns)
        (volume / RUNS).write_bytes(
            encode_json({"runs": [{"store": "s3://b/new"}, {"store": "s3://b/old", "versions": [theirs]}]})
        )

    def act(self) -> Any:
        settings = from_environment({"CKPT_DIR": str(self.volume)})
        return Resumer(settings, Asked(self.volume), RankConsensus(), missing=none_missing).choose(0)

    def check(self, result: Any) -> None:
        assert result is None


class JustInTimeIsSaved(Case):
    def __init__(self, volume: Path) -> None:
        super().__init__(volume)
        (volume / "checkpoint-5").mkdir()
        (volume / "checkpoint-5/abandoned").write_bytes(b"of an earlier attempt")

    def act(self) -> Any:
        return StepSaver(self.session(), Writer()).save_just_in_time(5)

    def check(self, result: Any) -> None:
        assert result
        [saved] = finished_on(self.volume)
        assert saved.name == "checkpoint-5"
        assert [file.path for file in saved.marker.files or ()] == ["model"]
        assert sorted(path.name for path in (self.volume / "checkpoint-5").iterdir()) == [".complete", "model"]


class RotationLeavesNothingHalf(Case):
    """The hook deletes finished checkpoints only: a half-deleted one, which has no marker, would stay for ever."""

    def __init__(self, volume: Path) -> None:
        super().__init__(volume)
        Writer().write(volume / "checkpoint-5")
        finish(volume / "checkpoint-5", Marker(step=5, attempt="a1"))

    def act(self) -> None:
        session = self.session()
        session.settings = replace(session.settings, save_total_limit=1)
        StepSaver(session, Writer()).save(10, "periodic")

    def check(self, result: Any) -> None:
        half = [folder for folder in self.volume.glob("checkpoint-*") if not (folder / ".complete").exists()]
        assert not any(file for folder in half for file in folder.iterdir())


class FinalIsSaved(Case):
    """The library writes it once; all else is tried again."""

    def __init__(self, volume: Path) -> None:
        super().__init__(volume)
        (volume / "final").mkdir()
        finish(volume / "final", Marker())
        (volume / "final/abandoned").write_bytes(b"of an earlier attempt")

    def act(self) -> None:
        StepSaver(self.session(), FinalWriter()).save_final(5)

    def check(self, result: Any) -> None:
        assert sorted(path.name for path in self.volume.glob("final/*")) == [".complete", "model"]


CASES: list[Callable[[Path], Case]] = [
    *(LeaseIsTaken, SuccessIsTold, NoticeIsTold, StepIsNotDisturbed, RequestOfAnEarlierProcessIsIgnored, ScriptBeforeIsKnown),
    *(CheckpointOfAnotherRunIsNotUsed, JustInTimeIsSaved, RotationLeavesNothingHalf, FinalIsSaved),
]


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_call_to_the_volume_that_fails_changes_nothing(
    case: Callable[[Path], Case], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PAUSE_S", 0.0)
    monkeypatch.setattr("trainer_hook.saving.step_saver.RETRY_S", 0.0)
    monkeypatch.setattr(earlier_scripts, "_this_script", lambda: "first.py")
    monkeypatch.setattr(earlier_scripts, "_container", lambda: "c")
    harmed = []
    for which in itertools.count(1):
        (volume := tmp_path / str(which)).mkdir()
        tried, failing = case(volume), FailingCall(which, number, below=str(volume))
        try:
            with failing.active():
                result = tried.act()
            tried.check(result)
        except Exception as error:
            harmed.append(f"{failing.failed}: {type(error).__name__} {str(error)[:300]}")
        if failing.failed is None:
            break
        assert which < MOST
    assert not harmed, "\n".join(harmed)


@pytest.mark.parametrize("number", [*NUMBERS, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_periodic_save_in_which_one_call_fails_costs_no_later_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "PAUSE_S", 0.0)
    for which in itertools.count(1):
        (volume := tmp_path / str(which)).mkdir()
        session, failing = Case(volume).session(), FailingCall(which, number, below=str(volume))
        saver = StepSaver(session, Writer())
        with failing.active():
            saved = saver.save(5, "periodic")
        names = ["checkpoint-5"] * saved + ["checkpoint-10"]
        assert saver.save(10, "periodic"), failing.failed
        found = {checkpoint.name: [file.path for file in checkpoint.marker.files or ()] for checkpoint in finished_on(volume)}
        assert found == {name: ["model"] for name in names}, failing.failed
        assert list(session.not_saved) == ["checkpoint-5"] * (not saved), failing.failed
        assert sorted(path.name for path in volume.glob("checkpoint-*")) == sorted(names), failing.failed
        assert not [path for path in (volume / ".ckpt").rglob("*") if path.name not in ("ranks", "trainer.json")]
        if failing.failed is None:
            return


def test_a_full_volume_takes_the_success_in_place_of_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A classic sidecar waited for it for ever."""
    told = SuccessIsTold(tmp_path)
    told.session().tell_state("running", 5)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trainer_hook.volume.publish.publish", full)
    told.act()
    told.check(None)
