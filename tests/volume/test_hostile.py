"""A trainer that shares the volume, not the credentials, and writes there whatever it likes.

The real classes, with files, links, fifos and sockets in every place where something else is expected.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from sidecar.cli.client import Client
from sidecar.core.format.manifest import FileEntry
from sidecar.download.partial_file import PartialFile, holds
from sidecar.download.quarantine import Quarantine
from sidecar.errors import CheckpointChanged, CheckpointRejected
from sidecar.upload.send.journal import Journal
from sidecar.volume.lock import hold_volume
from sidecar.volume.opener import Folder
from sidecar.volume.sockets import connect_unix, listen_unix
from sidecar.volume.unfinished import Unfinished, list_files
from sidecar.volume.volume import Volume
from tests.hostile.trainer.attacks import exchanging
from tests.lifecycle.beginning import begin
from tests.process.sidecar_process import write_checkpoint
from tests.volume.conftest import SECRET, finished
from trainer_hook.contract import (
    ANSWER,
    API_SOCKET,
    EXIT_REPORT,
    INCOMING,
    JOURNAL,
    LEASES,
    MARKER,
    PINS,
    REQUEST,
    TERMINATING,
    TOKEN,
    TRAINER_STATE,
)

EXCHANGE_S = 2.0


# A directory that is exchanged for a link while it is read.


@pytest.mark.parametrize("inside", ["", "/deep"], ids=["the checkpoint", "a folder in it"])
def test_nothing_of_another_folder_is_ever_read_or_linked(
    inside: str, volume: Volume, outside: Path, untouched: Callable[[], bool]
) -> None:
    folder = write_checkpoint(volume.root, "checkpoint-1", {"model": b"own", "deep/model": b"own"}, {})
    (volume.root / "link").symlink_to(outside / inside.lstrip("/"))
    secret_inodes = {path.stat().st_ino for path in outside.rglob("*")}
    checkpoint, source = finished(volume), Unfinished(volume / "checkpoint-1")
    for file in checkpoint.files:
        source.see_growing(file)
    times = dict.fromkeys(["examined", "looked", "read", "refused", "held"], 0)
    ends_s = time.monotonic() + EXCHANGE_S
    with exchanging((Path(f"{folder}{inside}"), volume.root / "link")):
        while time.monotonic() < ends_s:
            with suppress(CheckpointRejected, OSError):
                found = volume.examine("checkpoint-1")
                assert not secret_inodes & {file.inode for file in found.files}
                times["examined"] += 1
            seen = list_files(volume / "checkpoint-1", {})
            assert not secret_inodes & {file.inode for file in (*seen.closed, *seen.open)}
            times["looked"] += 1
            for path in ("model", "deep/model"):
                try:
                    with source.open(path) as fd:
                        assert os.read(fd, 100) == b"own"
                        times["read"] += 1
                except (CheckpointChanged, CheckpointRejected):
                    times["refused"] += 1
            with suppress(CheckpointRejected, OSError):
                if volume.pins.hold(checkpoint).held:
                    times["held"] += 1
                    pinned = (volume.root / PINS).rglob("*")
                    assert not secret_inodes & {path.lstat().st_ino for path in pinned}
                    volume.pins.release(checkpoint)
            volume.is_unchanged(checkpoint)
            volume.fingerprint("checkpoint-1")
    assert min(times.values()) > 0, times
    assert untouched()


def test_nothing_outside_is_deleted_while_a_checkpoint_is(volume: Volume, outside: Path, untouched: Callable[[], bool]) -> None:
    ends_s, times = time.monotonic() + EXCHANGE_S, 0
    (volume.root / "link").symlink_to(outside)
    while time.monotonic() < ends_s:
        folder = write_checkpoint(
            volume.root, "checkpoint-1", {f"deep/{n}": b"x" for n in range(30)} | {"deep/model": b"x"}, {}
        )
        with exchanging((folder / "deep", volume.root / "link")), suppress(OSError):
            volume.delete("checkpoint-1")
        for left in (folder, volume.root / "link"):
            if left.is_symlink():
                left.unlink()
        if not (volume.root / "link").is_symlink():
            (volume / "link").discard()
            (volume.root / "link").symlink_to(outside)
        (volume / "checkpoint-1").discard()
        times += 1
    assert times > 1
    assert untouched()


# Links in place of what the sidecar owns.


@pytest.mark.parametrize("place", [PINS, INCOMING, JOURNAL, LEASES])
def test_a_link_for_a_folder_of_the_system_is_replaced_at_the_start(
    place: str, volume: Volume, outside: Path, untouched: Callable[[], bool]
) -> None:
    (volume / place).discard()
    (volume.root / place).symlink_to(outside)
    with structlog.testing.capture_logs() as said:
        Volume(volume.root).prepare()
    assert (volume / place).is_folder()
    assert [event["event"] for event in said] == ["not_a_directory"]
    assert untouched()


def test_a_link_for_the_folder_of_the_system_is_refused(volume: Volume, outside: Path, untouched: Callable[[], bool]) -> None:
    (volume.root / ".ckpt").rename(volume.root / "moved")
    (volume.root / ".ckpt").symlink_to(outside)
    with pytest.raises(NotADirectoryError, match=r"remove it: '.*/volume/\.ckpt'"):
        Volume(volume.root).prepare()
    assert untouched()


@pytest.mark.parametrize("place", [".ckpt", PINS, INCOMING, JOURNAL, LEASES])
def test_a_link_that_comes_later_is_named_in_the_log_and_not_followed(
    place: str, volume: Volume, outside: Path, untouched: Callable[[], bool]
) -> None:
    write_checkpoint(volume.root, "checkpoint-1", {"model": b"own"}, {})
    checkpoint, entry = finished(volume), FileEntry(path="model", key="checkpoint-1/model", size_bytes=9, crc64nvme="0" * 16)
    (volume.root / place).rename(volume.root / "moved")
    (volume.root / place).symlink_to(outside)
    with structlog.testing.capture_logs() as said:
        volume.pins.hold(checkpoint)
        volume.pins.release(checkpoint)
        volume.drop_journal(volume / PINS / "checkpoint-1@0")
        journal = Journal(volume.early_journal("checkpoint-1"))
        journal.dropped("model")
        journal.delete()
        assert volume.held_leases() == 0
        with suppress(OSError):
            PartialFile.prepare(volume.incoming / "partial", entry).discard()
        for path in (TERMINATING, REQUEST, TOKEN, EXIT_REPORT):
            with suppress(OSError):
                (volume / path).publish(b"x")
            with suppress(OSError):
                (volume / path).remove()
        with suppress(OSError):
            listen_unix(volume / API_SOCKET).close()
    assert any(event["event"] == "path_refused" and place in event["path"] for event in said)
    assert untouched()


@pytest.mark.parametrize("path", [TERMINATING, REQUEST, ANSWER, TRAINER_STATE, EXIT_REPORT, TOKEN])
def test_a_link_for_a_small_file_is_not_read_and_is_replaced_when_it_is_written(
    path: str, volume: Volume, outside: Path, untouched: Callable[[], bool]
) -> None:
    (volume.root / path).symlink_to(outside / "model")
    assert volume.read_small(path) is None
    (volume / path).publish(b"{}")
    assert volume.read_small(path) == b"{}"
    assert untouched()


def test_a_socket_is_made_and_found_in_its_folder_alone(volume: Volume, outside: Path, untouched: Callable[[], bool]) -> None:
    (volume.root / API_SOCKET).symlink_to(outside / "model")
    with listen_unix(volume / API_SOCKET) as listening:
        assert stat.S_IMODE((volume / API_SOCKET).status().st_mode) == 0o660
        with connect_unix(volume / API_SOCKET, timeout_s=5):
            listening.accept()[0].close()
    with socket.socket(socket.AF_UNIX) as elsewhere, (Folder(outside) / "").listed() as fd:
        elsewhere.bind(f"/proc/self/fd/{fd}/socket")
        elsewhere.listen()
        (volume / API_SOCKET).remove()
        (volume.root / API_SOCKET).symlink_to(outside / "socket")
        with pytest.raises(OSError, match="Socket operation on non-socket"):
            connect_unix(volume / API_SOCKET, timeout_s=5)
    (outside / "socket").unlink()
    assert untouched()


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_command_sends_no_other_file_than_the_token(
    kind: str, volume: Volume, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_DIR", str(volume.root))
    (volume / TOKEN).publish(b"token")
    assert Client()._token() == "token"
    (volume / TOKEN).remove()
    if kind == "link":
        (volume.root / TOKEN).symlink_to(outside / "model")
    else:
        os.mkfifo(volume.root / TOKEN)
    assert Client()._token() is None


# The volume itself, where it is a folder of a mount that the trainer can write to.


def test_a_volume_that_is_exchanged_for_a_link_is_away(volume: Volume, outside: Path, untouched: Callable[[], bool]) -> None:
    write_checkpoint(outside, "checkpoint-1", {"model": SECRET})
    assert volume.names() == []
    volume.root.rename(volume.root.with_name("moved"))
    volume.root.symlink_to(outside)
    for look in (volume.names, volume.free_bytes):
        with pytest.raises(OSError, match="link on a volume"):
            look()
    assert volume.marker_version("checkpoint-1") is None
    volume.delete("checkpoint-1")
    assert (outside / "checkpoint-1/model").exists()
    volume.root.unlink()
    write_checkpoint(volume.root.with_name("moved"), "checkpoint-2", {"model": b"own"})
    volume.root.with_name("moved").rename(volume.root)
    assert volume.names() == ["checkpoint-2"]
    volume.root.rename(volume.root.with_name("older"))
    write_checkpoint(volume.root, "checkpoint-3", {"model": b"own"})
    assert volume.names() == ["checkpoint-3"]  # mounted anew


def test_links_that_the_operator_made_lead_to_the_volume(volume: Volume, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("also/../volume")
    (tmp_path / "also").mkdir()
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    (tmp_path / "round").symlink_to("round")
    write_checkpoint(volume.root, "checkpoint-3", {"model": b"own"})
    linked = Volume(tmp_path / "absolute")
    assert linked.names() == linked.names() == ["checkpoint-3"]
    for path in ("round", "nowhere", "volume/checkpoint-3/model"):
        with pytest.raises(OSError, match=path):
            Volume(tmp_path / path).names()


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or Path("/dev/shm").stat().st_dev == Path("/").stat().st_dev, reason="one mount"
)
def test_a_link_on_a_volume_is_not_taken_for_the_operators(volume: Volume) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        (Path(shared) / "checkpoints").symlink_to(volume.root)
        with pytest.raises(OSError, match="name the folder itself"):
            Volume(Path(shared) / "checkpoints").prepare()


# Fifos: nothing waits for the other end.


@pytest.mark.timeout(20)
def test_no_fifo_holds_anything_up(volume: Volume) -> None:
    entry = FileEntry(path="model", key="checkpoint-1/model", size_bytes=9, crc64nvme="0" * 16)
    write_checkpoint(volume.root, "checkpoint-1", {"model": b"x"})
    (volume.root / "checkpoint-1" / MARKER).unlink()
    small = [TRAINER_STATE, EXIT_REPORT, TERMINATING, REQUEST, ANSWER, ".ckpt/pod.json", f"{JOURNAL}/quarantine.json"]
    fifos = [f"{JOURNAL}/checkpoint-1@early.jsonl", f"{LEASES}/0.lease", ".ckpt/lock", f"checkpoint-1/{MARKER}", *small]
    for path in fifos:
        os.mkfifo(volume.root / path)
    with pytest.raises(CheckpointRejected, match="not a regular file"):
        volume.examine("checkpoint-1")
    assert volume.held_leases() == 0
    assert volume.early_uploads() == {"checkpoint-1"}
    journal = Journal(volume.early_journal("checkpoint-1"))
    journal.begun("model", "s", upload_id="u", key="checkpoint-1/model", part_bytes=5)
    assert set(journal.uploads) == {"model"}
    journal.delete()
    assert Quarantine(volume.journal / "quarantine.json").quarantined == {}
    pod, termination = begin(volume)
    assert not termination.poll_notice()
    assert not pod.trainer_succeeded()
    assert not holds(volume / "checkpoint-1" / MARKER, entry)


async def test_a_lock_that_is_no_file_is_made_anew(volume: Volume) -> None:
    lock = volume.root / ".ckpt/lock"
    for is_fifo in (True, False):
        (volume / ".ckpt/lock").discard()
        if is_fifo:
            os.mkfifo(lock)
        else:
            lock.symlink_to("/etc")
        assert await hold_volume(volume / ".ckpt/lock", told_to_end=asyncio.Event())
        assert stat.S_ISREG((volume / ".ckpt/lock").status().st_mode)


def test_what_lies_on_another_mount_is_refused_with_the_reason(volume: Volume, outside: Path) -> None:
    (volume.root / "checkpoint-1").mkdir()
    write_checkpoint(volume.root, "checkpoint-2", {"data/model": b"x"}, {})
    targets = [volume.root / "checkpoint-1", volume.root / "checkpoint-2/data"]
    mounted = []
    try:
        for target in targets:
            if subprocess.run(["mount", "--bind", outside, target], capture_output=True, check=False).returncode:
                pytest.skip("mounting needs root")
            mounted.append(target)
        for name in ("checkpoint-1", "checkpoint-2"):
            assert volume.read_marker_version(name) is not None
            with pytest.raises(CheckpointRejected, match="on another mount; a checkpoint lies on the shared volume alone"):
                volume.examine(name)
    finally:
        for target in mounted:
            subprocess.run(["umount", target], check=True)
