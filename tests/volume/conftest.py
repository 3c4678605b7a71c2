"""A volume and, beside it, a folder that stands for a mounted secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.core.format.found_checkpoint import Finished, Identity, judge
from sidecar.volume.volume import Volume
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import Node

SECRET = b"the secret of the sidecar"


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    (tmp_path / "volume").mkdir()
    made = Volume(tmp_path / "volume")
    made.prepare()
    return made


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the volume that looks like a checkpoint: stands for a mounted secret."""
    folder = tmp_path / "outside"
    write_checkpoint(tmp_path, "outside", {"model": SECRET, "deep/model": SECRET}, {})
    folder.chmod(0o750)
    return folder


@pytest.fixture
def untouched(outside: Path) -> Callable[[], bool]:
    def seen() -> dict[str, tuple[int, int, int]]:
        everything = [outside, *outside.rglob("*")]
        return {str(p): (p.stat().st_mode, p.stat().st_size, p.stat().st_nlink) for p in everything}

    before = seen()
    return lambda: seen() == before


def finished(volume: Volume, name: str = "checkpoint-1") -> Finished:
    return judge(volume.examine(name), Identity(Node(), "attempt"))
