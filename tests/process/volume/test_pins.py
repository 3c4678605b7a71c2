"""What one life of the sidecar holds, and what the next one makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

FIRST = {"aaa": b"0" * 500, "model": b"A" * 100}


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    return {"CKPT_STORE": f"file://{tmp_path / 'store'}"}


@pytest.fixture
def held(store: dict[str, str], tmp_path: Path) -> Path:
    """A volume with a checkpoint that a killed sidecar had pinned and begun to upload."""
    with sidecar(tmp_path / "volume", store | {"CKPT_BANDWIDTH_LIMIT": "1"}) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-20", FIRST, {})
        until(lambda: running.events("checkpoint_uploading"))
        running.kill()
    assert left_behind(tmp_path / "volume")
    return tmp_path / "volume"


def left_behind(volume: Path) -> list[str]:
    return [path.name for folder in ("pins", "journal") for path in (volume / ".ckpt" / folder).iterdir()]


def stored(tmp_path: Path) -> dict[str, bytes]:
    return {path: content for path, content in contents(tmp_path / "store/checkpoint-20").items() if ".ckpt/" not in path}


def a_life(volume: Path, store: Mapping[str, str], *, rotates: bool = False) -> None:
    """Let a sidecar make all durable that it knows of."""
    with sidecar(volume, store) as running:
        running.ready()
        running.committed("checkpoint-20")
        if rotates:
            shutil.rmtree(volume / "checkpoint-20")
        assert running.terminate() == 0
    (volume / ".ckpt/terminating").unlink(missing_ok=True)


@pytest.mark.parametrize("listed", [False, True], ids=["without a list", "with a list"])
def test_a_marker_rewritten_in_place_while_nobody_looked_commits_the_files_that_it_was_written_for(
    listed: bool, held: Path, store: dict[str, str], tmp_path: Path
) -> None:
    second = FIRST | {"optimizer": b"B" * 100}
    (held / "checkpoint-20/optimizer").write_bytes(second["optimizer"])
    files = [{"path": path, "size_bytes": len(content)} for path, content in second.items()]
    # The same inode as before, which the pin links.
    (held / "checkpoint-20/.complete").write_text(json.dumps({"files": files} if listed else {}))
    a_life(held, store)
    assert stored(tmp_path) == second


def test_a_pin_of_an_older_version_never_replaces_the_newer_durable_one(
    held: Path, store: dict[str, str], tmp_path: Path
) -> None:
    shutil.rmtree(held / "checkpoint-20")
    write_checkpoint(held, "checkpoint-20", {"model": b"C" * 100}, {})
    a_life(held, store, rotates=True)
    assert left_behind(held) == []
    with sidecar(held, store | {"CKPT_RESUME": "on-demand"}) as running:
        running.ready()
        assert running.terminate() == 0
        assert running.events("checkpoint_finished") == []
    assert stored(tmp_path) == {"model": b"C" * 100}


def test_a_pin_that_is_the_only_copy_becomes_durable(held: Path, store: dict[str, str], tmp_path: Path) -> None:
    shutil.rmtree(held / "checkpoint-20")
    a_life(held, store)
    assert stored(tmp_path) == FIRST
    assert left_behind(held) == []


def test_what_a_killed_sidecar_was_letting_go_is_not_taken_for_a_checkpoint(
    held: Path, store: dict[str, str], tmp_path: Path
) -> None:
    [pin] = (held / ".ckpt/pins").iterdir()
    pin.rename(pin.with_name(f"{pin.name}.1234.tmp"))
    shutil.rmtree(held / "checkpoint-20")
    with sidecar(held, store) as running:
        running.ready()
        assert running.terminate() == 0
    assert left_behind(held) == []
