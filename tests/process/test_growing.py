"""Files of which the beginning is sent while the trainer still writes the rest."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, sidecar, until

MIB = 1 << 20
STEP_S = 0.6
"""Longer than from one look at the directory to the next."""


def content(mib: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(mib * MIB)


def sent(running: Sidecar, size_bytes: int) -> None:
    until(lambda: running.status()["sent_bytes"] >= size_bytes, what=f"sent; log:\n{running.log()[-3000:]}")


def finish(running: Sidecar, folder: Path) -> None:
    (folder / ".complete").write_text("{}")
    running.committed(folder.name)


def test_the_beginning_of_a_file_is_in_the_store_before_its_end_is_written(place: Place, tmp_path: Path) -> None:
    want = content(71)
    with sidecar(tmp_path / "volume", place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        with (folder / "optimizer.pt").open("wb", buffering=0) as file:
            for begin in range(0, 60 * MIB, 20 * MIB):
                file.write(want[begin : begin + 20 * MIB])
                time.sleep(STEP_S)
            file.write(want[60 * MIB : 61 * MIB])
            sent(running, 48 * MIB)
            file.write(want[61 * MIB :])
        finish(running, folder)
        assert place.store.get("checkpoint-10/optimizer.pt") == want
        assert running.status()["sent_bytes"] == len(want), "nothing was sent twice"
        assert running.events("checkpoint_sent_early")[0]["growing_files"] == 1


def test_a_file_that_is_changed_in_its_beginning_at_last_is_sent_again_and_later_ones_when_they_are_closed(
    place: Place, tmp_path: Path
) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        for step in (10, 20):
            want = bytearray(content(40, seed=step))
            folder = running.ready().volume / f"checkpoint-{step}"
            folder.mkdir()
            with (folder / "states.npz").open("wb", buffering=0) as file:
                file.write(want[: 20 * MIB])
                time.sleep(STEP_S)
                file.write(want[20 * MIB :])
                if step == 10:
                    sent(running, 16 * MIB)
                else:
                    time.sleep(2 * STEP_S)
                    assert len(running.events("checkpoint_sent_early")) == 1
                want[4:12] = b"new head"
                file.seek(4)
                file.write(b"new head")
            finish(running, folder)
            assert place.store.get(f"checkpoint-{step}/states.npz") == bytes(want)
        assert running.events("early_upload_waits_for_closing")


@pytest.mark.parametrize("anew", ["truncated", "replaced"])
def test_a_file_that_is_begun_anew_is_not_mixed_with_what_it_was(place: Place, tmp_path: Path, anew: str) -> None:
    before, want = content(40), content(40, seed=2)
    with sidecar(tmp_path / "volume", place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        path = folder / "model.bin"
        with path.open("wb", buffering=0) as file:
            file.write(before[: 20 * MIB])
            time.sleep(STEP_S)
            file.write(before[20 * MIB :])
            sent(running, 16 * MIB)
            if anew == "replaced":
                path.unlink()
                path.write_bytes(want)
            else:
                file.seek(0)
                file.truncate()
                file.write(want[: 20 * MIB])
                time.sleep(STEP_S)
                file.write(want[20 * MIB :])
        finish(running, folder)
        assert place.store.get("checkpoint-10/model.bin") == want


def test_a_file_that_has_its_size_before_its_content_is_not_sent_before_it_is_closed(place: Place, tmp_path: Path) -> None:
    want = content(40)
    with sidecar(tmp_path / "volume", place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        with (folder / "model.bin").open("wb", buffering=0) as file:
            file.truncate(len(want))
            for begin in range(0, len(want), 20 * MIB):
                file.write(want[begin : begin + 20 * MIB])
                time.sleep(STEP_S)
            assert not running.events("checkpoint_sent_early")
        finish(running, folder)
        assert place.store.get("checkpoint-10/model.bin") == want
