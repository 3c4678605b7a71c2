"""The runs of a volume, where the volume fails while they are recorded."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.lifecycle import volume_record
from sidecar.volume.opener import Place
from sidecar.volume.volume import Volume
from tests.catalog.conftest import Failing, failing  # noqa: F401 - a fixture
from tests.lifecycle.beginning import begin
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import RUNS

A, B = VolumeRun("s3://b/a", "ns/a"), VolumeRun("s3://b/b", "ns/b")


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """A volume on which run A left checkpoint-50."""
    volume = Volume(tmp_path / "volume")
    volume.root.mkdir()
    volume.prepare()
    assert volume_record.begin(volume, A) == frozenset()
    write_checkpoint(volume.root, "checkpoint-50", {"m": b"of a"}, {})
    return volume


def version(volume: Volume, name: str) -> str:
    found = volume.marker_version(name)
    assert found
    return found


def test_a_marker_that_cannot_be_read_now_does_not_become_the_next_runs_own(volume: Volume, failing: Failing) -> None:  # noqa: F811
    assert volume_record.begin(volume, B) == {version(volume, "checkpoint-50")}
    failing("checkpoint-50")
    with pytest.raises(OSError, match="Too many open files"):
        volume_record.begin(volume, B)
    failing("")
    assert volume_record.begin(volume, B) == {version(volume, "checkpoint-50")}


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_runs_that_cannot_be_read_now_are_not_forgotten(volume: Volume, failing: Failing, number: int) -> None:  # noqa: F811
    """They were written anew with the present run alone, whose own the checkpoints of the others were from then on."""
    assert volume_record.begin(volume, B) == {version(volume, "checkpoint-50")}
    failing(RUNS, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        volume_record.begin(volume, B)
    failing("")
    assert volume_record.begin(volume, B) == {version(volume, "checkpoint-50")}


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP])
def test_a_folder_that_this_user_can_never_read_stops_no_sidecar(
    volume: Volume,
    failing: Failing,  # noqa: F811
    number: int,
) -> None:
    failing("checkpoint-50", number)
    assert volume_record.begin(volume, B) == frozenset()


def test_a_pod_whose_run_could_not_be_recorded_keeps_what_it_wrote_itself(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full volume took no record; once the sidecar was started again, the pod's own checkpoints were another run's."""
    real = Place.publish

    def publish(place: Place, content: bytes, *more: object) -> None:
        if str(place).endswith(RUNS):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(place, content, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Place, "publish", publish)
    for _ in range(2):
        pod, _ = begin(volume, "pod-b", run=B)
        assert pod.identity().foreign == {version(volume, "checkpoint-50")}
        write_checkpoint(volume.root, "checkpoint-60", {"m": b"of b"}, {})
