"""A folder with a checkpoint's name that is a symbolic link: rejected with its reason, and never followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.trainer.attacks import outside_of, state_of
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

REASON = "a symbolic link is in the way; links are not followed"


def to_another_disk(volume: Path, name: str) -> None:
    """As a trainer does that writes to a larger disk."""
    (volume / name).symlink_to(write_checkpoint(volume.parent / "disk", name, {"model": b"weights"}, {}))


def to_a_folder_inside(volume: Path, name: str) -> None:
    (volume / name).symlink_to(write_checkpoint(volume, "best", {"model": b"weights"}, {}).name)


def to_nothing(volume: Path, name: str) -> None:
    (volume / name).symlink_to("not-there")


def to_itself(volume: Path, name: str) -> None:
    (volume / name).symlink_to(name)


@pytest.mark.parametrize("name", ["checkpoint-20", "final"])
@pytest.mark.parametrize("link", [to_another_disk, to_a_folder_inside, to_nothing, to_itself])
def test_a_link_in_the_place_of_a_folder_is_rejected_in_log_status_and_exit_report(
    link: Callable[[Path, str], None], name: str, tmp_path: Path
) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path}/store"}) as running:
        volume = running.ready().volume
        write_checkpoint(volume, "checkpoint-10", {"model": b"own"}, {})
        running.committed("checkpoint-10")
        link(volume, name)
        [event] = until(lambda: running.events("checkpoint_rejected"), what=running.log)
        assert (event["checkpoint"], event["level"]) == (name, "warning")
        assert REASON in event["reason"]
        assert REASON in running.status()["rejected"][name]
        assert running.terminate() == 3
        assert REASON in str(running.report)
        assert len(running.events("checkpoint_rejected")) == 1
        assert not (tmp_path / "store" / name).exists()


def test_a_folder_that_takes_the_place_of_its_link_is_sent(tmp_path: Path) -> None:
    outside = outside_of(tmp_path)
    before = state_of(outside)
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path}/store"}) as running:
        volume = running.ready().volume
        (volume / "checkpoint-20").symlink_to(outside)
        until(lambda: running.events("checkpoint_rejected"), what=running.log)
        (volume / "checkpoint-20").unlink()
        write_checkpoint(volume, "checkpoint-20", {"model": b"own"}, {})
        running.committed("checkpoint-20")
        assert running.status()["rejected"] == {}
        assert running.terminate() == 0
    assert state_of(outside) == before


def test_a_resume_whose_place_is_a_link_follows_it_nowhere(tmp_path: Path) -> None:
    outside = outside_of(tmp_path)
    before = state_of(outside)
    store = {"CKPT_STORE": f"file://{tmp_path}/store"}
    with sidecar(tmp_path / "first", store) as running:
        write_checkpoint(running.ready().volume, "checkpoint-20", {"model": b"own"}, {})
        running.committed("checkpoint-20")
        assert running.terminate() == 0
    (tmp_path / "second").mkdir()
    (tmp_path / "second/checkpoint-20").symlink_to(outside)
    with sidecar(tmp_path / "second", store) as running:
        answer = running.ready().resume()
        assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-20")
        assert contents(Path(answer["path"])) == {"model": b"own"}
    assert state_of(outside) == before
