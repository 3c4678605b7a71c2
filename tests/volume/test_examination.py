from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.volume.examination import examine_volume


def test_a_directory_that_works_has_no_errors_and_stays_empty(tmp_path: Path) -> None:
    found = examine_volume(tmp_path, state=tmp_path)
    errors = (found.missing, found.write_error, found.link_error, found.rename_error, found.inotify_error, found.state_error)
    assert errors == (None,) * 6
    assert (found.owner, found.mode) == (tmp_path.stat().st_uid, tmp_path.stat().st_mode & 0o7777)
    assert 0 < (found.free_bytes or 0) <= (found.total_bytes or 0)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_missing_or_a_file_is_not_made(tmp_path: Path) -> None:
    assert examine_volume(tmp_path / "none").missing == "No such file or directory"
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    assert examine_volume(tmp_path / "file").missing == "Not a directory"


def test_owners_of_checkpoints_are_named_and_those_of_other_directories_are_not(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "logs"):
        (tmp_path / name).mkdir()
    assert examine_volume(tmp_path).other_owners == ()
    if os.geteuid() == 0:
        os.chown(tmp_path / "checkpoint-1", 4711, -1)
        os.chown(tmp_path / "logs", 4712, -1)
        assert examine_volume(tmp_path).other_owners == (4711,)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_read_only_mount_is_told_from_missing_rights(tmp_path: Path) -> None:
    script = f"""
import os, subprocess
from pathlib import Path
from sidecar.volume.examination import examine_volume
root = Path({str(tmp_path)!r})
subprocess.run(["mount", "--bind", root, root], check=True)
subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
print(examine_volume(root).write_error)
subprocess.run(["umount", root], check=True)
os.chmod(root, 0o755)
os.setgroups([]); os.setgid(4711); os.setuid(4711)
print(examine_volume(root).write_error)
"""
    tmp_path.parent.chmod(0o755)
    command = ["unshare", "--mount", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this container may not mount")
    said = done.stdout.splitlines()
    assert said[0] == "Read-only file system", done.stderr
    assert said[1] in ("Permission denied", "None")
