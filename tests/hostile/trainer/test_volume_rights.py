"""Files that the sidecar's user may not read, link or delete, and checkpoints of extreme shape."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hostile.checks import check_log, most_memory_mib
from tests.process.conftest import Place
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint

NOBODY = 65_532
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all")
BY_ANOTHER_USER = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root runs a sidecar as another user"
)
MANY = 100_000


@BY_ANOTHER_USER
def test_files_that_another_user_closed_are_named_and_committed_once_they_are_readable(
    open_to_nobody: tuple[Path, Path],
) -> None:
    volume, store = open_to_nobody
    closed = {"checkpoint-1": "model", "checkpoint-2": "deep", "checkpoint-3": ".complete", "checkpoint-4": ""}
    with sidecar(volume, {"CKPT_STORE": f"file://{store}"}, within=AS_NOBODY) as running:
        running.ready()
        for name, path in closed.items():
            folder = write_checkpoint(volume, f"new-{name}", {"model": b"own", "deep/model": b"own"}, {})
            (folder / path).chmod(0)
            folder.rename(volume / name)  # closed before it is found
        write_checkpoint(volume, "checkpoint-5", {"model": b"own"}, {})
        running.committed("checkpoint-5")
        until(lambda: unreadable(running) == set(closed), what=lambda: str(running.events()))
        for name, path in closed.items():
            (volume / name / path).chmod(0o755)  # the marker is the same
            running.committed(name)
        assert running.terminate() == 0
    check_log(running)


@BY_ANOTHER_USER
def test_a_checkpoint_that_cannot_be_read_at_the_end_is_not_called_durable(open_to_nobody: tuple[Path, Path]) -> None:
    volume, store = open_to_nobody
    with sidecar(volume, {"CKPT_STORE": f"file://{store}", "CKPT_GRACE_SECONDS": "3"}, within=AS_NOBODY) as running:
        running.ready()
        write_checkpoint(volume, "checkpoint-1", {"model": b"own"}, {}).chmod(0)
        until(lambda: unreadable(running) == {"checkpoint-1"}, what=lambda: str(running.events()))
        assert running.terminate() == 3
    check_log(running)


@BY_ANOTHER_USER
def test_a_checkpoint_with_a_folder_of_another_user_is_not_deleted_in_part(open_to_nobody: tuple[Path, Path]) -> None:
    """It was logged as deleted: its marker was, its largest files stayed until the volume was full."""
    volume, store = open_to_nobody
    with sidecar(
        volume, {"CKPT_STORE": f"file://{store}", "CKPT_KEEP_LOCAL": "1", "CKPT_RESUME": "on-demand"}, within=AS_NOBODY
    ) as running:
        running.ready()
        for step in (1, 2, 3):
            folder = write_checkpoint(volume, f"checkpoint-{step}", {"model": b"own", "deep/model": b"own"}, {})
            folder.chmod(0o777)
            (folder / "deep").chmod(0o777 if step > 1 else 0o755)
            running.committed(f"checkpoint-{step}")
        until(lambda: running.events("local_checkpoint_deleted"))
        assert not (volume / "checkpoint-2").exists()
        told = {e["checkpoint"]: e["event"] for e in running.events() if e["event"].startswith("local_checkpoint_")}
        assert told == {"checkpoint-1": "local_checkpoint_not_deleted", "checkpoint-2": "local_checkpoint_deleted"}
        assert all((volume / "checkpoint-1" / path).exists() for path in ("model", "deep/model", ".complete"))
    check_log(running)


@pytest.fixture
def open_to_nobody() -> Iterator[tuple[Path, Path]]:
    """A volume and a store that any user may write to. Not below ``tmp_path``: each new run of pytest closes its root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        volume, store = Path(folder, "volume"), Path(folder, "store")
        for place in (volume, store):
            place.mkdir()
            place.chmod(0o777)
        yield volume, store


def unreadable(running: Sidecar) -> set[str]:
    """Return the checkpoints of which the sidecar says that it may not read them, and why."""
    known = running.call("GET", "/v1/checkpoints")["checkpoints"]
    return {each["name"] for each in known if f"not readable for user {NOBODY}" in (each["reason"] or "")}


@pytest.fixture
def immutable() -> Iterator[list[Path]]:
    """Files to release at the end."""
    files: list[Path] = []
    yield files
    for file in files:
        with suppress(FileNotFoundError):
            subprocess.run(["chattr", "-i", file], check=False, capture_output=True)


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_file_that_cannot_be_linked_or_deleted_is_committed_and_disturbs_nothing(
    immutable: list[Path], place: Place, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, place.settings | {"CKPT_KEEP_LOCAL": "1"}) as running:
        running.ready()
        folder = write_checkpoint(volume, "checkpoint-1", {"model": b"own", "z": b"z"}, {})
        (folder / ".complete").unlink()
        immutable.append(folder / "model")
        if subprocess.run(["chattr", "+i", folder / "model"], check=False, capture_output=True).returncode:
            pytest.skip("chattr +i needs root and a file system that has it")
        (folder / ".complete").write_text("{}")
        running.committed("checkpoint-1")
        for step in (2, 3, 4):
            write_checkpoint(volume, f"checkpoint-{step}", {"model": b"own"}, {})
            running.committed(f"checkpoint-{step}")
        until(lambda: not (volume / "checkpoint-2").exists() and not (volume / "checkpoint-3").exists())
        assert running.terminate() == 0
    check_log(running)


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_checkpoint_that_is_renamed_under_way_is_committed_with_its_own_content(place: Place, tmp_path: Path) -> None:
    volume, store = tmp_path / "volume", tmp_path / "store"
    with sidecar(volume, place.settings | {"CKPT_BANDWIDTH_LIMIT": "2MB/s"}) as running:
        running.ready()
        first = {"model": os.urandom(2 << 20), "deep/model": b"first"}
        second = {"model": os.urandom(2 << 20), "deep/model": b"second"}
        write_checkpoint(volume, "checkpoint-5", first, {})
        until(lambda: [each["state"] for each in running.status()["queue"]] == ["uploading"])  # 0.8 s at that rate
        (volume / "checkpoint-5").rename(volume / "checkpoint-7")
        write_checkpoint(volume, "checkpoint-5", second, {})
        running.call("POST", "/v1/bandwidth", {"limit": None})
        running.committed("checkpoint-7")
        until(lambda: running.call("GET", "/v1/checkpoints/checkpoint-5").get("state") == "committed")
        until(lambda: not running.status()["queue"])
        assert running.terminate() == 0
    for name, wanted in (("checkpoint-5", second), ("checkpoint-7", first)):
        assert {path: c for path, c in contents(store / name).items() if not path.startswith(".ckpt/")} == wanted
    check_log(running)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_hundred_thousand_files_hold_no_other_checkpoint_up(place: Place, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, place.settings | {"CKPT_GRACE_SECONDS": "5"}) as running:
        running.ready()
        large = volume / "checkpoint-1"
        for number in range(MANY):
            if number % 1000 == 0:
                (large / str(number // 1000)).mkdir(parents=True)
            (large / str(number // 1000) / str(number)).touch()
        (large / ".complete").write_text("{}")
        for step in (2, 3):
            write_checkpoint(volume, f"checkpoint-{step}", {"model": b"own"}, {})
            running.committed(f"checkpoint-{step}")
        until(lambda: running.call("GET", "/v1/checkpoints/checkpoint-1").get("state") == "uploading")
        assert running.status()["http_status"] == 200
        write_checkpoint(volume, "checkpoint-4", {"model": b"own"}, {})
        running.committed("checkpoint-4")
        assert most_memory_mib(running) < 400
        code = running.terminate(timeout_s=20)
        assert code in (0, 3)
        assert "checkpoint-4" in running.report["durable"]
    check_log(running)
