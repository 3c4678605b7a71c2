"""The marker comes last when a checkpoint is finished, and goes first when it is deleted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sidecar.core.format.found_checkpoint import Identity, judge
from sidecar.volume.volume import Volume
from trainer_hook.contract import MARKER, TOKEN, ContractError, Marker, Node, parse_marker
from trainer_hook.volume import checkpoint_folder
from trainer_hook.volume.checkpoint_folder import finish, finished_on, listed_files, open_to_group, remove
from trainer_hook.volume.publish import make_system_folders, publish


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def checkpoint(volume: Path, name: str = "checkpoint-5", **files: bytes) -> Path:
    folder = volume / name
    folder.mkdir(parents=True)
    for path, content in (files or {"model": b"weights"}).items():
        (folder / path).write_bytes(content)
    return folder


def test_finishing_opens_the_files_to_other_users_and_writes_the_marker(volume: Path) -> None:
    folder = checkpoint(volume)
    (folder / "model").chmod(0o600)
    (folder / "run.sh").touch(0o700)
    folder.chmod(0o700)
    finish(folder, Marker(step=5))
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "model").stat().st_mode & 0o777 == 0o644
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o744
    assert (folder / ".complete").stat().st_mode & 0o044 == 0o044
    assert parse_marker((folder / ".complete").read_bytes(), name="checkpoint-5").step == 5


def test_symbolic_links_are_neither_followed_nor_listed(volume: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").touch(0o600)
    folder = checkpoint(volume)
    (folder / "link").symlink_to(outside / "secret")
    (folder / "folder").symlink_to(outside)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    open_to_group(folder)
    assert (outside / "secret").stat().st_mode & 0o777 == 0o600
    assert [file.path for file in listed_files(folder)] == ["model"]


def test_every_file_is_listed_by_path_but_the_marker_itself(volume: Path) -> None:
    folder = checkpoint(volume)
    (folder / "sub/deep").mkdir(parents=True)
    (folder / "sub/deep/a").write_bytes(b"12")
    (folder / "sub/.complete").write_bytes(b"1")
    (folder / ".complete").touch()
    assert [(f.path, f.size_bytes) for f in listed_files(folder)] == [("model", 7), ("sub/.complete", 1), ("sub/deep/a", 2)]


def test_a_name_that_the_contract_refuses_is_not_listed_in_silence(volume: Path) -> None:
    folder = checkpoint(volume)
    (folder / "two\nlines").touch()
    with pytest.raises(ContractError, match="not a plain path"):
        listed_files(folder)


def test_removing_takes_the_marker_first(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(volume)
    finish(folder, Marker())
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", lambda *_, **__: None)
    remove(folder)
    assert names(folder) == ["model"]
    monkeypatch.undo()
    remove(folder)
    remove(folder)
    assert names(volume) == []


def test_only_whole_checkpoints_are_found_on_a_volume(volume: Path) -> None:
    finish(checkpoint(volume, "checkpoint-1"), Marker(step=1))
    whole = checkpoint(volume, "checkpoint-2")
    finish(whole, Marker(files=listed_files(whole)))
    short = checkpoint(volume, "checkpoint-3")
    finish(short, Marker(files=listed_files(short)))
    (short / "model").write_bytes(b"x")
    lost = checkpoint(volume, "checkpoint-4")
    finish(lost, Marker(files=listed_files(lost)))
    (lost / "model").unlink()
    checkpoint(volume, "checkpoint-5")
    finish(checkpoint(volume, "checkpoint-6"), Marker(step=7))
    finish(checkpoint(volume, "checkpoint-07"), Marker())
    (checkpoint(volume, "checkpoint-8") / ".complete").write_bytes(b"{")
    assert sorted(found.name for found in finished_on(volume)) == ["checkpoint-1", "checkpoint-2"]
    assert finished_on(volume / "nowhere") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize(("uid", "gid", "file_mode"), [(os.geteuid(), 3000, 0o644), (4000, 3000, 0o664), (4000, 5000, 0o644)])
def test_a_sidecar_of_another_user_of_the_group_may_link_and_delete(uid: int, gid: int, file_mode: int, volume: Path) -> None:
    make_system_folders(volume)
    publish(volume / TOKEN, b"x")
    os.chown(volume / TOKEN, uid, gid)
    folder = checkpoint(volume)
    for path in (folder, folder / "model"):
        os.chown(path, os.geteuid(), 3000)
        path.chmod(0o2700 if path == folder else 0o600)  # 2: what is made in it is of its group
    finish(folder, Marker())
    for path in (folder / "model", folder / MARKER):
        assert path.stat().st_mode & 0o7777 == file_mode
    assert folder.stat().st_mode & 0o7777 == file_mode | 0o2111


def test_a_checkpoint_is_finished_although_the_clock_was_set_back_while_it_was_written(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model=b"weights", optimizer=b"state")
    ahead_ns = time.time_ns() + 30_000_000_000
    os.utime(folder / "model", ns=(ahead_ns, ahead_ns))
    finish(folder, Marker(files=tuple(listed_files(folder))))
    judged = judge(Volume(tmp_path).examine(folder.name), Identity(Node(), "pod"))
    assert {file.path for file in judged.files} == {"model", "optimizer"}
    with (folder / "optimizer").open("ab") as file:
        file.write(b"!")
    os.utime(folder / "optimizer", ns=(ahead_ns + 1, ahead_ns + 1))
    with pytest.raises(ContractError):
        judge(Volume(tmp_path).examine(folder.name), Identity(Node(), "pod"))
