"""The sidecar's own folder on the shared volume: removed, replaced by a link, or rewritten while it runs."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.checks import check_log
from tests.hostile.trainer.attacks import SECRET, outside_of, state_of, stored_with, token_of
from tests.marks import slow
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

FILES = {"model": b"weights" * 1000, "deep/model": b"more" * 1000}
Attack = Callable[[Path, Path], None]


def removed(system: Path, _: Path) -> None:
    shutil.rmtree(system)


def link_instead(folder: Path, outside: Path) -> None:
    """Put a link in the place of ``folder``, also where the sidecar makes it anew between the two steps."""
    moved = (folder.with_name(f"moved-{n}") for n in range(100))
    while not folder.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            folder.rename(next(moved))
        with contextlib.suppress(FileExistsError):
            folder.symlink_to(outside)


def replaced_by_a_link(system: Path, outside: Path) -> None:
    link_instead(system, outside)


def emptied_of_pins(system: Path, outside: Path) -> None:
    link_instead(system / "pins", outside)


def filled_with_other_pins(system: Path, outside: Path) -> None:
    for pin in (system / "pins").iterdir():
        shutil.rmtree(pin)
        pin.symlink_to(outside)


RARE = slow(removed, emptied_of_pins, filled_with_other_pins)
ATTACKS = [replaced_by_a_link, *RARE]


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("attack", ATTACKS)
def test_without_its_own_folder_it_sends_what_is_finished_and_touches_nothing_else(
    attack: Attack, place: Place, tmp_path: Path
) -> None:
    outside, volume, store = outside_of(tmp_path), tmp_path / "volume", tmp_path / "store"
    before = state_of(outside)
    with sidecar(volume, place.settings | {"CKPT_BANDWIDTH_LIMIT": "2MB/s", "CKPT_GRACE_SECONDS": "20"}) as running:
        running.ready()
        write_checkpoint(volume, "checkpoint-1", FILES, {})
        running.committed("checkpoint-1")
        write_checkpoint(volume, "checkpoint-2", {"model": os.urandom(3 << 20)}, {})
        until(lambda: [each["state"] for each in running.status()["queue"]] == ["uploading"])  # 1.3 s at that rate
        attack(volume / ".ckpt", outside)
        running.call("POST", "/v1/bandwidth", {"limit": None})
        write_checkpoint(volume, "checkpoint-3", FILES, {})
        running.committed("checkpoint-3")
        running.committed("checkpoint-2")  # its files are still in its directory
        assert (store / "checkpoint-2/model").read_bytes() == (volume / "checkpoint-2/model").read_bytes()
        assert running.status()["http_status"] == 200
        assert running.terminate() == 0
    assert state_of(outside) == before
    assert stored_with(store, SECRET[:64]) == []
    check_log(running)
    with sidecar(tmp_path / "new-volume", place.settings) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-3"
        assert contents(running.volume / "checkpoint-3") == FILES


def test_a_token_that_the_trainer_writes_opens_nothing(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_API_TOKEN": "required"}) as running:
        running.ready()
        until(lambda: (volume / ".ckpt/token").exists())
        token = token_of(running).decode()
        for forged in ("", "x", "forged", token[:-1], "\x00", "a" * 100_000):
            (volume / ".ckpt/token").write_text(forged)
            if forged.isprintable() and len(forged) < 1000:
                assert running.call("POST", "/v1/drain", {}, token=forged)["http_status"] in (401, 403)
        (volume / ".ckpt/token").unlink()
        assert running.call("POST", "/v1/bandwidth", {"limit": None})["http_status"] in (401, 403)
        assert running.call("POST", "/v1/bandwidth", {"limit": None}, token=token)["http_status"] == 200
        assert running.status()["phase"] in ("starting", "running"), "nobody drained it"
