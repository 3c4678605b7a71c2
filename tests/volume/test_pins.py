"""Pins: what is read while somebody removes, replaces or rewrites the links."""

from __future__ import annotations

import errno
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format.found_checkpoint import Finished, Identity, judge
from sidecar.errors import CheckpointChanged, CheckpointRejected
from sidecar.volume.pins import Pin
from sidecar.volume.volume import Volume
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import PINS, Node


def hold(volume: Volume) -> tuple[Pin, Finished]:
    write_checkpoint(volume.root, "checkpoint-1", {"model": b"weights", "deep/optimizer": b"state"}, {})
    checkpoint = judge(volume.examine("checkpoint-1"), Identity(Node(), "pod"))
    pin = volume.pins.hold(checkpoint)
    assert pin.held
    return pin, checkpoint


def held(folder: Path) -> Pin:
    folder.mkdir(exist_ok=True)
    return hold(Volume(folder))[0]


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


@pytest.mark.parametrize("call", ["rename", "rmdir", "scandir"])
def test_a_pin_that_cannot_be_removed_now_is_removed_later(call: str, volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that is open keeps its directory: the links of each such checkpoint stayed until the next start."""
    _, checkpoint = hold(volume)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        volume.pins.release(checkpoint)
    assert list((volume.root / PINS).iterdir())
    volume.pins.remove_rest()
    assert not list((volume.root / PINS).iterdir())


def test_a_pin_that_could_not_be_removed_and_is_held_again_stays(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoint = hold(volume)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        volume.pins.release(checkpoint)
    pin = volume.pins.hold(checkpoint)
    volume.pins.remove_rest()
    shutil.rmtree(volume.root / "checkpoint-1")
    assert content_of(pin, "model") == b"weights"


def test_a_pin_that_is_held_again_while_the_late_removal_begins_stays(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoint = hold(volume)
    rename = os.rename

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        volume.pins.release(checkpoint)
    with ThreadPoolExecutor(1) as pool:
        holding: list[Future[Pin]] = []

        def rename_late(*of: Any, **where: Any) -> None:
            if not holding:
                holding.append(pool.submit(volume.pins.hold, checkpoint))
                wait(holding, timeout=0.5)
            rename(*of, **where)

        monkeypatch.setattr(os, "rename", rename_late)
        volume.pins.remove_rest()
        pin = holding[0].result()
    shutil.rmtree(volume.root / "checkpoint-1")
    assert content_of(pin, "model") == b"weights"
