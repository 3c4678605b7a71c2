"""Checkpoints that no sane trainer writes, all at once: each is rejected with its reason, or committed as it is."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.checks import check_log, most_memory_mib
from tests.hostile.trainer.attacks import SECRET, outside_of, state_of, stored_with, token_of
from tests.process.sidecar_process import Sidecar, contents, sidecar, until

MARKER_BYTES = 1 << 20
Write = Callable[[Path, Path], None]
"""Puts something into a checkpoint that is not finished yet. Its second argument is the folder outside."""


@dataclass(frozen=True)
class Odd:
    """``says``: part of the reason of the rejection."""

    says: str
    write: Write
    marker: bytes = b"{}"


def fifo(folder: Path, _: Path) -> None:
    os.mkfifo(folder / "fifo")


def listening(folder: Path, _: Path) -> None:
    (folder / "deep").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        fd = os.open(folder / "deep", os.O_RDONLY)
        made.bind(f"/proc/self/fd/{fd}/socket")
        os.close(fd)


def device(kind: int) -> Write:
    def write(folder: Path, _: Path) -> None:
        if os.geteuid() == 0:
            os.mknod(folder / "device", kind | 0o666, os.makedev(1, 5))  # as /dev/zero
        else:
            (folder / "device").symlink_to("/dev/zero")

    return write


def link(target: str | None) -> Write:
    return lambda folder, outside: (folder / "model2").symlink_to(target or outside / "model")


def folder_link(folder: Path, outside: Path) -> None:
    (folder / "deep").symlink_to(outside)


def marker_link(folder: Path, outside: Path) -> None:
    (folder / ".complete").symlink_to(outside / ".complete")


def own_file(name: str) -> Write:
    return lambda folder, _: os.link(folder.parent / ".ckpt" / name, folder / "model2")


def own_marker(folder: Path, _: Path) -> None:
    os.link(folder.parent / ".ckpt/token", folder / ".complete")


def sparse(folder: Path, _: Path) -> None:
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 15 << 40)


def named(name: bytes) -> Write:
    def write(folder: Path, _: Path) -> None:
        path = folder / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    return write


def deep(folder: Path, _: Path) -> None:
    """Make folders inside each other, until their path is longer than any that the kernel takes."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(30):
        os.mkdir(b"d" * 200, dir_fd=fd)
        inner = os.open(b"d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("model", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)


def nothing(folder: Path, _: Path) -> None:
    (folder / "model").unlink()


def marker_folder(folder: Path, _: Path) -> None:
    (folder / ".complete").mkdir()


def as_it_is(*_: Path) -> None:
    pass


REJECTED = {
    "fifo": Odd("'fifo' is a fifo", fifo),
    "socket": Odd("'deep/socket' is a socket", listening),
    "character device": Odd("'device' is a ", device(stat.S_IFCHR)),
    "block device": Odd("'device' is a ", device(stat.S_IFBLK)),
    "link to a secret": Odd("'model2' is a symbolic link", link(None)),
    "link to itself": Odd("'model2' is a symbolic link", link("model2")),
    "link inside": Odd("'model2' is a symbolic link", link("model")),
    "link to /proc": Odd("'model2' is a symbolic link", link("/proc/self/environ")),
    "link for a folder": Odd("'deep' is a symbolic link", folder_link),
    "link for the marker": Odd("links are not followed", marker_link),
    "folder for the marker": Odd("not a regular file", marker_folder),
    "token": Odd("'model2' is a hard link to .ckpt/token", own_file("token")),
    "lock": Odd("'model2' is a hard link to .ckpt/lock", own_file("lock")),
    "token for the marker": Odd(".complete is a hard link to .ckpt/token", own_marker),
    "sparse bomb": Odd("'sparse' is a sparse file of 16492674416640 bytes", sparse),
    "marker that is too large": Odd("marker of 1048577 bytes is larger", as_it_is, b"{}" + b" " * (MARKER_BYTES - 1)),
    "marker without an end": Odd("not JSON", as_it_is, b'{"meta": ' + b"[" * 500_000),
    "deep meta": Odd("nested deeper", as_it_is, b'{"meta": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}"),
    "NaN": Odd("what JSON cannot", as_it_is, b'{"meta": {"loss": NaN}}'),
    "bool for a step": Odd("step must be an integer", as_it_is, b'{"step": true}'),
    "step out of range": Odd("step must be an integer", as_it_is, b'{"step": 1e400}'),
    "way out": Odd("is not a plain path", as_it_is, b'{"files": [{"path": "../../outside/model", "size_bytes": 1}]}'),
    "absolute": Odd("is not a plain path", as_it_is, b'{"files": [{"path": "/etc/passwd", "size_bytes": 1}]}'),
    "token by name": Odd("is reserved", as_it_is, b'{"files": [{"path": ".ckpt/token", "size_bytes": 1}]}'),
    "NUL": Odd("is not a plain path", as_it_is, b'{"files": [{"path": "mo\\u0000del", "size_bytes": 1}]}'),
    "listed and missing": Odd("is not there", as_it_is, b'{"files": [{"path": "other", "size_bytes": 1}]}'),
    "listed twice": Odd("twice", as_it_is, b'{"files": [%s, %s]}' % ((b'{"path": "model", "size_bytes": 3}',) * 2)),
    "name that is no UTF-8": Odd("is not valid UTF-8", named(b"mo\xff\xfedel")),
    "name with a line break": Odd(
        "is not a plain path", named(b'x\n{"event": "checkpoint_committed", "checkpoint": "checkpoint-1"}')
    ),
    "name with an escape": Odd("is not a plain path", named(b"\x1b]0;owned\x07\x1b[2J\x1b[31mred")),
    "name of the system": Odd("is reserved", named(b".ckpt/token")),
    "deeper than a path": Odd("File name too long", deep),
    "nothing": Odd("it holds no files", nothing),
}


def private(folder: Path, _: Path) -> None:
    (folder / "model").chmod(0o6755)
    (folder / "model").touch()
    (folder / "x").mkdir()


def unicode(folder: Path, _: Path) -> None:
    for name in ("Model", "MODEL", "caf\u00e9", "cafe\u0301", "\u202egnp.exe", "-rf", "$(reboot)", "%s%n", "a b"):
        (folder / name).write_bytes(name.encode())


TAKEN: dict[str, Write] = {"setuid": private, "names that look alike": unicode}


def write_odd(volume: Path, name: str, write: Write, outside: Path, marker: bytes) -> None:
    folder = volume / name
    folder.mkdir()
    (folder / "model").write_bytes(b"own")
    write(folder, outside)
    if not os.path.lexists(folder / ".complete"):
        # Whole at once: a marker that is seen half written is examined again, with a line of its own.
        (volume.parent / "marker").write_bytes(marker)
        (volume.parent / "marker").rename(folder / ".complete")


def test_each_odd_checkpoint_is_rejected_with_its_reason_and_the_others_are_committed(tmp_path: Path) -> None:
    outside, store = outside_of(tmp_path), tmp_path / "store"
    before = state_of(outside)
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{store}", "CKPT_GRACE_SECONDS": "20"}) as running:
        volume = running.ready().volume
        until(lambda: (volume / ".ckpt/token").exists())
        token = token_of(running)
        taken = dict(zip(TAKEN, (f"checkpoint-{n}" for n in range(10, 100)), strict=False))
        for what, write in TAKEN.items():
            write_odd(volume, taken[what], write, outside, b"{}")
        names = dict(zip(REJECTED, (f"checkpoint-{n}" for n in range(100, 1000)), strict=False))
        for what, odd in REJECTED.items():
            write_odd(volume, names[what], odd.write, outside, odd.marker)
        for name in taken.values():
            running.committed(name)
            assert {p: c for p, c in contents(store / name).items() if not p.startswith(".ckpt/")} == contents(volume / name)
        until(lambda: len(running.events("checkpoint_rejected")) >= len(names), what=lambda: str(unlike(running, names)))
        assert unlike(running, names) == {}
        assert len(running.events("checkpoint_rejected")) == len(names), "one line each"
        for command in ("ls", "status"):
            shown = running.command(command).stdout
            assert "checkpoint-100" in shown
            assert all(line.isprintable() and not line.startswith('{"event"') for line in shown.split("\n"))
        assert most_memory_mib(running) < 200
        assert running.terminate() == 3, "the newest is rejected"
        assert set(names.values()) >= running.report["newest_rejected"].keys() > set()
    check_log(running)
    assert stored_with(store, SECRET[:64]) == stored_with(store, token) == []
    # Files that were sent early, before the marker was there, have no manifest.
    assert {path.parents[2].name for path in store.glob("*/.ckpt/*/node-*.json")} == set(taken.values())
    assert {path.parent.name for path in store.glob("*/.complete")} == set(taken.values())
    assert state_of(outside) == before


def unlike(running: Sidecar, names: dict[str, str]) -> dict[str, str]:
    reasons = {event["checkpoint"]: event["reason"] for event in running.events("checkpoint_rejected")}
    return {w: reasons.get(n, "")[:300] for w, n in names.items() if REJECTED[w].says not in reasons.get(n, "")}
