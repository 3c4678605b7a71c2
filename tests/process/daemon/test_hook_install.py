"""``CKPT_INSTALL_HOOK``: the hook is on the volume before the API answers, and nothing changes under a training that runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mounts import small_volume
from tests.process.daemon.test_trouble import fill
from tests.process.sidecar_process import sidecar
from trainer_hook import CURRENT

OTHER = "trainer_hook-000000000000"
LOOK = "import sys; print('trainer_hook.activation.boot' in sys.modules)"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    return {"CKPT_STORE": f"file://{tmp_path}/store", "CKPT_INSTALL_HOOK": f"{tmp_path}/volume/.ckpt/hook"}


@contextmanager
def training(volume: Path) -> Iterator[None]:
    with (volume / ".ckpt/ranks/0.lease").open("w") as lease:
        fcntl.lockf(lease, fcntl.LOCK_EX)
        yield


def seen(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def test_it_is_there_before_the_api_answers_and_a_restart_changes_nothing(tmp_path: Path, settings: dict[str, str]) -> None:
    hook = Path(settings["CKPT_INSTALL_HOOK"])
    with sidecar(tmp_path / "volume", settings) as running:
        running.up()
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(hook), "CKPT_HOOK": "auto"}
        shown = subprocess.run(
            [sys.executable, "-c", LOOK], env=environ, capture_output=True, text=True, check=True, timeout=60
        )
        assert (shown.stdout, shown.stderr) == ("True\n", "")
        [event] = running.events("hook_installed")
        assert (event["is_new"], event["version"]) == (True, (hook / CURRENT).readlink().name)
        before = seen(hook)
        running.kill()
    with sidecar(tmp_path / "volume", settings) as again:
        again.up()
        assert [event["is_new"] for event in again.events("hook_installed")] == [False]
        assert seen(hook) == before


def installed_by_another_version(hook: Path) -> str:
    """Give the installed hook another version's name. Returns this sidecar's version."""
    own = (hook / CURRENT).readlink().name
    (hook / own).rename(hook / OTHER)
    (hook / CURRENT).unlink()
    (hook / CURRENT).symlink_to(OTHER)
    return own


def test_another_version_is_replaced_once_no_training_runs_with_it(tmp_path: Path, settings: dict[str, str]) -> None:
    hook, volume = Path(settings["CKPT_INSTALL_HOOK"]), tmp_path / "volume"
    with sidecar(volume, settings) as first:
        first.up()
        own = installed_by_another_version(hook)
        first.kill()
    with training(volume), sidecar(volume, settings) as beside:
        beside.up()
        assert [event["version"] for event in beside.events("hook_installed")] == [OTHER]
        assert (hook / CURRENT).readlink().name == OTHER
        beside.kill()
    with sidecar(volume, settings) as later:
        later.up()
        assert (hook / CURRENT).readlink().name == own
        assert (hook / OTHER / "trainer_hook/__init__.py").is_file(), "for processes that still have it"


def test_on_a_full_volume_the_version_that_is_there_stays(tmp_path: Path, settings: dict[str, str]) -> None:
    hook = Path(settings["CKPT_INSTALL_HOOK"])
    with small_volume(tmp_path / "volume", "24m") as volume:
        with sidecar(volume, settings) as first:
            first.up()
            installed_by_another_version(hook)
            first.kill()
        fill(volume)
        with sidecar(volume, settings) as later:
            later.ready()
            assert [event["version"] for event in later.events("hook_installed")] == [OTHER]
        shutil.rmtree(hook)
        fill(volume)
        with sidecar(volume, settings) as without:
            assert without.wait() == 2
            assert "CKPT_INSTALL_HOOK" in without.log()
            assert "free space" in without.log()


def test_a_training_that_runs_keeps_its_sidecar_where_the_hook_cannot_be_written(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, settings) as first:
        first.up()
    (tmp_path / "file").touch()
    with training(volume), sidecar(volume, settings | {"CKPT_INSTALL_HOOK": str(tmp_path / "file/hook")}) as beside:
        beside.ready()
        assert len(beside.events("hook_not_installed")) == 1
