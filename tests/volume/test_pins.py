"""Pins: what is read while somebody removes, replaces or rewrites the links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sidecar.core.format.found_checkpoint import Identity, judge
from sidecar.errors import CheckpointChanged, CheckpointRejected
from sidecar.volume.pins import Pin
from sidecar.volume.volume import Volume
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import Node


def held(folder: Path) -> Pin:
    write_checkpoint(folder, "checkpoint-1", {"model": b"weights", "deep/optimizer": b"state"}, {})
    volume = Volume(folder)
    pin = volume.pins.hold(judge(volume.examine("checkpoint-1"), Identity(Node(), "pod")))
    assert pin.held
    return pin


def content_of(pin: Pin, path: str) -> bytes:
    with pin.open(path) as fd:
        return os.read(fd, 100)


def test_links_outlive_the_files_and_the_files_outlive_the_links(tmp_path: Path) -> None:
    rotated, emptied, replaced = (held(tmp_path / name) for name in ("rotated", "emptied", "replaced"))
    shutil.rmtree(tmp_path / "rotated/checkpoint-1")
    shutil.rmtree(tmp_path / "emptied/.ckpt/pins")
    shutil.rmtree(tmp_path / "replaced/.ckpt/pins")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/model").write_bytes(b"another's")
    (tmp_path / "replaced/.ckpt/pins").symlink_to(tmp_path / "secret")
    for pin in (rotated, emptied, replaced):
        assert content_of(pin, "model") == b"weights"
        assert content_of(pin, "deep/optimizer") == b"state"


def test_another_file_is_taken_neither_for_a_link_nor_for_the_file_itself(tmp_path: Path) -> None:
    pin = held(tmp_path)
    shutil.rmtree(tmp_path / ".ckpt/pins")
    (tmp_path / "checkpoint-1/model").unlink()
    with pytest.raises(CheckpointRejected, match="model"):
        content_of(pin, "model")
    (tmp_path / "checkpoint-1/model").write_bytes(b"weights")
    with pytest.raises(CheckpointChanged, match="model"):
        content_of(pin, "model")
