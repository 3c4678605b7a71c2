"""Regular files that do not belong into a checkpoint, although a trainer put them there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.errors import CheckpointRejected
from sidecar.volume.unfinished import list_files
from sidecar.volume.volume import Volume
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import EXIT_REPORT, JOURNAL, MARKER, TOKEN


@pytest.mark.parametrize("own", [TOKEN, EXIT_REPORT, ".ckpt/lock", f"{JOURNAL}/checkpoint-1@early.jsonl"])
@pytest.mark.parametrize("inside", ["model", "deep/model"])
def test_a_hard_link_to_a_file_of_the_sidecar_is_no_file_of_a_checkpoint(own: str, inside: str, volume: Volume) -> None:
    (volume / own).publish(b"{}")
    folder = write_checkpoint(volume.root, "checkpoint-1", {"weights": b"own"}, {})
    (folder / inside).parent.mkdir(exist_ok=True)
    os.link(volume.root / own, folder / inside)
    assert volume.examine("checkpoint-1").irregular == ((inside, f"hard link to {own}"),)
    seen = list_files(volume / "checkpoint-1", {})
    assert {file.path for file in (*seen.closed, *seen.open)} == {"weights"}


def test_a_marker_is_no_file_of_the_sidecar(volume: Volume) -> None:
    (volume / TOKEN).publish(b"{}")
    folder = write_checkpoint(volume.root, "checkpoint-1", {"weights": b"own"}, {})
    (folder / MARKER).unlink()
    os.link(volume.root / TOKEN, folder / MARKER)
    with pytest.raises(CheckpointRejected, match=r"\.complete is a hard link to \.ckpt/token"):
        volume.examine("checkpoint-1")


def test_files_that_checkpoints_share_are_theirs(volume: Volume) -> None:
    folder = write_checkpoint(volume.root, "checkpoint-1", {"weights": b"own"}, {})
    other = write_checkpoint(volume.root, "checkpoint-2", {"x": b"x"}, {})
    os.link(folder / "weights", other / "weights")
    found = volume.examine("checkpoint-2")
    assert [file.path for file in found.files] == ["weights", "x"]
    assert found.irregular == ()


def test_a_sparse_file_larger_than_the_volume_is_none_of_a_checkpoint(volume: Volume, tmp_path: Path) -> None:
    folder = write_checkpoint(volume.root, "checkpoint-1", {"sparse": b"", "bomb": b""}, {})
    os.truncate(folder / "sparse", 1 << 30)
    os.truncate(folder / "bomb", volume.total_bytes() + 1)
    [(path, kind)] = volume.examine("checkpoint-1").irregular
    assert path == "bomb"
    assert kind.startswith("sparse file of ")
    seen = list_files(volume / "checkpoint-1", {})
    assert "bomb" not in {file.path for file in (*seen.closed, *seen.open)}
