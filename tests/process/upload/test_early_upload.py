"""Files of which the beginning is sent while the trainer still writes the rest."""

from __future__ import annotations

import functools
import random
import shutil
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.marks import slow
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import SCAN_S, Sidecar, grow_until, sidecar, until, write_checkpoint
from tests.processes import links_of, of_process

MIB = 1 << 20


def content(mib: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(mib * MIB)


@functools.cache
def wanted() -> bytes:
    return content(71)


def write_slowly(file: BinaryIO, want: bytes, *, mib: int) -> None:
    """Write so much from one look at the directory to the next."""
    for begin in range(0, len(want), mib * MIB):
        file.write(want[begin : begin + mib * MIB])
        time.sleep(SCAN_S)


def sent(running: Sidecar, size_bytes: int, *, file: BinaryIO, want: bytes) -> None:
    """Wait until so much was sent of a file that is still being written."""

    def is_sent() -> bool:
        return bool(running.status()["sent_bytes"] >= size_bytes)

    grow_until(file, want, is_sent, what=lambda: f"{size_bytes} bytes sent; log:\n{running.log()[-3000:]}")


def finish(running: Sidecar, folder: Path) -> None:
    (folder / ".complete").write_text("{}")
    running.committed(folder.name)


@pytest.mark.slow
def test_the_beginning_of_a_file_is_in_the_store_before_its_end_is_written(place: Place, tmp_path: Path) -> None:
    want = content(71)
    with sidecar(tmp_path / "volume", place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        with (folder / "optimizer.pt").open("wb", buffering=0) as file:
            write_slowly(file, want[: 60 * MIB], mib=20)
            sent(running, 48 * MIB, file=file, want=want)
            file.write(want[file.tell() :])
        finish(running, folder)
        assert place.read("checkpoint-10/optimizer.pt") == want
        assert running.status()["sent_bytes"] == len(want), "nothing was sent twice"
        assert running.events("checkpoint_sent_early")[0]["growing_files"] == 1


@ON_ONE_STORE
@pytest.mark.slow
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
                time.sleep(SCAN_S)
                if step == 10:
                    sent(running, 16 * MIB, file=file, want=want)
                file.write(want[file.tell() :])
                if step == 20:
                    waits = bool(running.events("early_upload_waits_for_closing"))
                    time.sleep(2 * SCAN_S)
                    early = [event["checkpoint"] for event in running.events("checkpoint_sent_early")]
                    assert not waits or folder.name not in early
                want[4:12] = b"new head"
                file.seek(4)
                file.write(b"new head")
            finish(running, folder)
            assert place.read(f"checkpoint-{step}/states.npz") == bytes(want)
        assert running.events("early_upload_waits_for_closing")


@ON_ONE_STORE
@pytest.mark.parametrize("anew", ["truncated", *slow("replaced")])
def test_a_file_that_is_begun_anew_is_not_mixed_with_what_it_was(place: Place, tmp_path: Path, anew: str) -> None:
    before, want = content(40), content(40, seed=2)
    with sidecar(tmp_path / "volume", place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        path = folder / "model.bin"
        with path.open("wb", buffering=0) as file:
            file.write(before[: 20 * MIB])
            time.sleep(SCAN_S)
            sent(running, 16 * MIB, file=file, want=before)
            file.write(before[file.tell() :])
            if anew == "replaced":
                path.unlink()
                path.write_bytes(want)
            else:
                file.seek(0)
                file.truncate()
                file.write(want[: 20 * MIB])
                time.sleep(SCAN_S)
                file.write(want[20 * MIB :])
        finish(running, folder)
        assert place.read("checkpoint-10/model.bin") == want


@ON_ONE_STORE
def test_a_file_that_has_its_size_before_its_content_is_not_sent_before_it_is_closed(place: Place, tmp_path: Path) -> None:
    want = content(40)
    with sidecar(tmp_path / "volume", place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        with (folder / "model.bin").open("wb", buffering=0) as file:
            file.truncate(len(want))
            write_slowly(file, want, mib=20)
            assert not running.events("checkpoint_sent_early")
        finish(running, folder)
        assert place.read("checkpoint-10/model.bin") == want


# The sidecar is killed meanwhile.


def killed_after(place: Place, volume: Path, size_bytes: int) -> None:
    """Let a sidecar send so much of ``checkpoint-10``, of which more is there, and kill it."""
    with sidecar(volume, place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        (folder / "optimizer.pt").write_bytes(b"")
        with (folder / "optimizer.pt").open("ab", buffering=0) as file:
            write_slowly(file, wanted()[: 48 * MIB], mib=16)
            sent(running, size_bytes, file=file, want=wanted())
            running.kill()


@pytest.mark.parametrize("finished", ["afterwards", "meanwhile"])
@pytest.mark.slow
def test_what_was_sent_of_an_unfinished_checkpoint_is_not_sent_again_after_a_kill(
    place: Place, tmp_path: Path, finished: str
) -> None:
    volume = tmp_path / "volume"
    killed_after(place, volume, 32 * MIB)
    path = volume / "checkpoint-10" / "optimizer.pt"

    def finish_it() -> None:
        with path.open("ab", buffering=0) as file:
            file.write(wanted()[path.stat().st_size :])
        (path.parent / ".complete").write_text("{}")

    if finished == "meanwhile":
        finish_it()
    with sidecar(volume, place.settings) as running:
        running.ready()
        if finished == "afterwards":
            time.sleep(SCAN_S)
            finish_it()
        running.committed("checkpoint-10")
        assert place.read("checkpoint-10/optimizer.pt") == wanted()
        assert running.status()["sent_bytes"] <= len(wanted()) - 32 * MIB
        assert not running.events("orphan_upload_aborted")
    assert not place.unfinished_uploads()


@ON_ONE_STORE
@pytest.mark.slow
def test_a_file_that_is_another_one_after_a_kill_is_sent_whole(place: Place, tmp_path: Path) -> None:
    volume, want = tmp_path / "volume", content(60, seed=2)
    killed_after(place, volume, 32 * MIB)
    (volume / "checkpoint-10" / "optimizer.pt").write_bytes(want)  # the same inode
    with sidecar(volume, place.settings) as running:
        finish(running.ready(), volume / "checkpoint-10")
        assert place.read("checkpoint-10/optimizer.pt") == want
    assert not place.unfinished_uploads()


@ON_ONE_STORE
def test_what_was_sent_of_a_checkpoint_that_is_gone_after_a_kill_is_removed(place: Place, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    killed_after(place, volume, 32 * MIB)
    shutil.rmtree(volume / "checkpoint-10")
    with sidecar(volume, place.settings):
        until(lambda: not place.unfinished_uploads(), what="the unfinished upload is aborted")
        until(lambda: not list((volume / ".ckpt/journal").iterdir()), what="nothing is remembered of it")


@ON_ONE_STORE
@pytest.mark.slow
def test_what_was_sent_early_is_kept_for_a_finished_checkpoint_of_which_only_the_pin_is_left(
    place: Place, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, place.settings) as running:
        folder = running.ready().volume / "checkpoint-10"
        folder.mkdir()
        with (folder / "optimizer.pt").open("wb", buffering=0) as file:
            write_slowly(file, wanted()[: 48 * MIB], mib=16)
            sent(running, 32 * MIB, file=file, want=wanted())
            running.command("limit", "1kB/s")
            file.write(wanted()[file.tell() :])
        (folder / ".complete").write_text("{}")
        until(lambda: running.events("checkpoint_finished"), what="held")
        shutil.rmtree(folder)
        running.kill()
    with sidecar(volume, place.settings) as running:
        running.ready().committed("checkpoint-10")
        assert place.read("checkpoint-10/optimizer.pt") == wanted()
        assert running.status()["sent_bytes"] <= len(wanted()) - 32 * MIB
        assert not running.events("upload_starts_again")


def watched(running: Sidecar) -> int:
    """Return how many folders the kernel watches for a process."""
    pid = running.process.pid
    fds = [fd for fd, leads_to in links_of(pid).items() if "inotify" in leads_to]
    return sum(of_process(pid, f"fdinfo/{fd}").count(b"inotify wd:") for fd in fds)


def test_checkpoints_are_watched_until_they_are_finished(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_KEEP_LOCAL": "99"}) as running:
        lone = watched(running.ready())
        (running.volume / "checkpoint-50").mkdir()
        until(lambda: watched(running) == lone + 1)
        for step in range(1, 41):  # quicker than anybody looks
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": b"%d" % step})
        running.committed("checkpoint-1")
        until(lambda: watched(running) == lone + 1, what="only the one that is not finished is watched")
        write_checkpoint(running.volume, "checkpoint-50", {"model": b"50"})
        running.committed("checkpoint-50")
        (running.volume / "checkpoint-45").mkdir()  # older than what is durable: of no interest
        time.sleep(1)
        assert watched(running) == lone
