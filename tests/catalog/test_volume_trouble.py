"""Trouble of the volume that passes: nothing that was finished is given up for it.

Inside one process, because nothing else makes a file system fail at a chosen call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.api.app import readyz
from sidecar.api.problems import Problem
from sidecar.catalog import scanner
from sidecar.core.format.found_checkpoint import Identity, judge
from sidecar.core.lifecycle.exit_codes import EXIT_GIVEN_UP
from sidecar.core.lifecycle.states import State
from sidecar.daemon.exit_report import exit_report
from sidecar.daemon.services import Services
from sidecar.daemon.settings import from_environment
from sidecar.volume.volume import Volume
from tests.catalog.conftest import Failing
from tests.process.sidecar_process import write_checkpoint
from tests.store.memory import MemoryStore
from trainer_hook.contract import Node


@pytest.fixture
def memory_volume() -> Iterator[Path]:
    """A volume in memory, as of an emptyDir: it keeps any time."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    volume = shm / f"checkpoint-sidecar-{uuid.uuid4().hex[:8]}"
    yield volume
    shutil.rmtree(volume, ignore_errors=True)


@pytest.fixture
def unlinkable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A volume without hard links and without modes, such as SMB or exFAT."""

    def refuse_mode(fd: int, mode: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def refuse(source: str, target: str, *, src_dir_fd: int, **more: Any) -> None:
        os.stat(source, dir_fd=src_dir_fd)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fchmod", refuse_mode)
    return tmp_path / "volume"


def new_life(volume: Path, **settings: str) -> Services:
    """The parts of a sidecar that starts on a volume."""
    volume.mkdir(exist_ok=True)
    environ = {"CKPT_DIR": str(volume), "CKPT_STORE": "file:///nowhere"} | settings
    services = Services(from_environment(environ), MemoryStore())
    services.volume.prepare()
    services.inventory.scanned.set()
    return services


def state_of(services: Services, name: str) -> State | None:
    tracked = services.catalog.get(name)
    return tracked.state if tracked else None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_looked_at_again(
    number: int, tmp_path: Path, failing: Failing
) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        failing("checkpoint-20/.complete", number)
        await services.scanner.scan()
        assert services.scanner.unsettled, "it may be finished: nothing ends without it"
        failing("", 0)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.FINISHED
        assert not services.scanner.unsettled

    asyncio.run(scenario())


def test_a_volume_that_cannot_be_read_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        services.state.capabilities = services.store.probe()
        await services.scanner.scan()
        assert (await readyz(services)).status == "ready"
        with monkeypatch.context() as patch:
            patch.setattr(services.volume, "names", _refused)
            await services.scanner.scan()
            with pytest.raises(Problem, match="Permission denied") as raised:
                await readyz(services)
            assert raised.value.document.status == 503
        await services.scanner.scan()
        assert (await readyz(services)).status == "ready"

    asyncio.run(scenario())


def _refused() -> list[str]:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/checkpoints")


def test_trouble_that_does_not_pass_is_shown_and_holds_nothing_up(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        write_checkpoint(tmp_path / "volume", "checkpoint-10", {"a": b"x"}, {})
        failing("checkpoint-20/.complete", errno.EIO)
        monkeypatch.setattr(scanner, "TROUBLE_S", 0.0)
        await services.scanner.scan()
        assert not services.scanner.unsettled
        assert state_of(services, "checkpoint-10") is State.FINISHED
        assert state_of(services, "checkpoint-20") is State.REJECTED
        failing("", 0)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())


def test_a_marker_that_is_a_link_is_refused_for_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        (folder / ".complete").rename(folder / "elsewhere")
        (folder / ".complete").symlink_to("elsewhere")
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.REJECTED
        assert not services.scanner.unsettled

    asyncio.run(scenario())


def test_trouble_at_the_start_leaves_a_pin_that_holds_the_only_copy(tmp_path: Path, failing: Failing) -> None:
    async def scenario() -> None:
        volume = tmp_path / "volume"
        first = new_life(volume)
        folder = write_checkpoint(volume, "checkpoint-20", {"a": b"x"}, {})
        await first.scanner.scan()
        shutil.rmtree(folder)
        second = new_life(volume)
        failing("/.complete", errno.ENFILE)
        await second.scanner.take_over_pins()
        assert second.scanner.unsettled
        failing("", 0)
        await second.scanner.scan()
        assert state_of(second, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())


def test_what_was_on_the_volume_at_the_start_is_found_in_the_first_scan(tmp_path: Path, failing: Failing) -> None:
    """Pins were found before the first scan, and what could not be read in a later one: the present attempt seemed earlier."""
    early, late = ({"attempt": f"2026010100000{second}Z-a".replace("20260101", "20260101T")} for second in (1, 2))

    async def scenario() -> None:
        volume = tmp_path / "volume"
        first = new_life(volume)
        write_checkpoint(volume, "checkpoint-10", {"a": b"x"}, early)
        await first.scanner.scan()
        write_checkpoint(volume, "checkpoint-20", {"a": b"x"}, late)
        await first.scanner.scan()
        assert first.scanner.found_in == {early["attempt"]: 1, late["attempt"]: 2}
        durable = first.catalog.get("checkpoint-10")
        assert durable
        assert durable.checkpoint
        first.volume.pins.release(durable.checkpoint)
        second = new_life(volume)
        failing("checkpoint-10/", errno.EIO)
        await second.scanner.take_over_pins()
        await second.scanner.scan()
        assert second.scanner.found_in == {late["attempt"]: 1}
        failing("", 0)
        write_checkpoint(volume, "checkpoint-30", {"a": b"x"}, {"attempt": "another"})
        await second.scanner.scan()
        await second.scanner.scan()
        assert second.scanner.found_in[early["attempt"]] == second.scanner.found_in[late["attempt"]] == 1
        assert second.scanner.found_in["another"] > 1

    asyncio.run(scenario())


def test_trouble_while_a_held_file_is_opened_does_not_lose_its_checkpoint(tmp_path: Path, failing: Failing) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        await services.scanner.scan()
        tracked = services.catalog.get("checkpoint-20")
        assert tracked
        assert tracked.checkpoint
        pin = services.volume.pins.hold(tracked.checkpoint)
        failing("/pins/", errno.EMFILE)
        with pytest.raises(OSError, match="Too many open files"), pin.open("a"):
            pass

    asyncio.run(scenario())


def rejection(services: Services, name: str) -> str:
    tracked = services.catalog.get(name)
    assert tracked
    assert tracked.state is State.REJECTED
    return str(tracked.reason)


def test_a_rewriting_that_was_cut_off_is_not_taken_for_the_checkpoint_that_was_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        volume = tmp_path / "volume"
        folder = write_checkpoint(volume, "checkpoint-20", {"model": b"A" * 3000}, {})
        with (folder / "model").open("r+b") as file:
            time.sleep(0.02)
            file.write(b"new!")
        services = new_life(volume)
        await services.scanner.scan()
        assert rejection(services, "checkpoint-20") == "'model' was written after the marker: write the marker again"
        (folder / ".complete").write_text("{}")
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())


def test_a_marker_from_the_year_11000_ends_nothing(memory_volume: Path) -> None:
    async def scenario() -> None:
        folder = write_checkpoint(memory_volume, "checkpoint-20", {"a": b"x"}, {})
        os.utime(folder / ".complete", (3e11, 3e11))
        services = new_life(memory_volume)
        await services.scanner.scan()
        assert "not of this calendar" in rejection(services, "checkpoint-20")

    asyncio.run(scenario())


def test_what_is_to_be_examined_again_holds_the_end_up_until_it_was(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        await services.scanner.scan()
        services.catalog.forget("checkpoint-20")
        services.scanner.examine_again("checkpoint-20")
        assert not services.inventory.everything_durable()
        await services.scanner.scan()
        assert not services.scanner.unsettled
        assert state_of(services, "checkpoint-20") is State.FINISHED
        services.scanner.examine_again("checkpoint-20")
        shutil.rmtree(folder)
        await services.scanner.scan()
        assert not services.scanner.unsettled

    asyncio.run(scenario())


@pytest.mark.parametrize("content", [b"", b"{"], ids=["empty", "cut off"])
@pytest.mark.parametrize("ends_as", ["gone", "without a marker", "with a link for a marker"])
def test_a_directory_that_goes_before_its_marker_settled_is_not_waited_for(
    content: bytes, ends_as: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-1", {"a": b"x"})
        (folder / ".complete").write_bytes(content)
        await services.scanner.scan()
        assert services.scanner.unsettled
        (folder / ".complete").unlink()
        if ends_as == "gone":
            shutil.rmtree(folder)
        elif ends_as == "with a link for a marker":
            (folder / ".complete").symlink_to("a")
        await services.scanner.scan()
        assert not services.scanner.unsettled
        assert services.inventory.everything_durable()

    asyncio.run(scenario())


def test_what_cannot_be_held_and_is_deleted_is_lost_and_stays_reported(unlinkable: Path) -> None:
    async def scenario() -> None:
        services = new_life(unlinkable)
        folder = write_checkpoint(unlinkable, "checkpoint-1", {"a": b"x"}, {})
        await services.scanner.scan()
        shutil.rmtree(folder)
        for _ in range(2):
            await services.scanner.scan()
            assert state_of(services, "checkpoint-1") is State.LOST
        written = exit_report(services.catalog, services.termination, bad={}, unfinished={}, had_hook=True)
        assert written["exit_code"] == EXIT_GIVEN_UP
        assert [entry["checkpoint"] for entry in written["given_up"]] == ["checkpoint-1"]
        write_checkpoint(unlinkable, "checkpoint-1", {"a": b"x"}, {})
        await services.scanner.scan()
        assert state_of(services, "checkpoint-1") is State.FINISHED

    asyncio.run(scenario())


def test_what_was_lost_during_its_upload_stays_reported_when_its_directory_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-1", {"a": b"x"}, {})
        await services.scanner.scan()
        tracked = services.catalog.get("checkpoint-1")
        assert tracked
        services.catalog.move(tracked, State.UPLOADING)
        services.catalog.move(tracked, State.LOST, reason="a file is gone")
        shutil.rmtree(folder)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-1") is State.LOST

    asyncio.run(scenario())


def test_what_is_in_the_store_and_waits_for_other_nodes_is_not_lost_with_its_directory(unlinkable: Path) -> None:
    async def scenario() -> None:
        services = new_life(unlinkable)
        folder = write_checkpoint(unlinkable, "checkpoint-1", {"a": b"x"}, {})
        await services.scanner.scan()
        tracked = services.catalog.get("checkpoint-1")
        assert tracked
        services.catalog.move(tracked, State.UPLOADING)
        services.catalog.move(tracked, State.UPLOADED)
        shutil.rmtree(folder)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-1") is State.UPLOADED

    asyncio.run(scenario())


def test_files_that_go_between_the_look_and_the_links_are_lost_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-1", {"a": b"x"}, {})

        def rotated(*args: Any, **more: Any) -> None:
            monkeypatch.undo()
            shutil.rmtree(folder)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

        monkeypatch.setattr(os, "link", rotated)
        await services.scanner.scan()
        await services.scanner.scan()
        assert state_of(services, "checkpoint-1") is State.LOST

    asyncio.run(scenario())


def test_what_is_on_a_volume_that_became_read_only_is_sent_unheld(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root; CI is root")
    volume, frozen = tmp_path / "volume", tmp_path / "frozen"
    write_checkpoint(volume, "checkpoint-1", {"model": b"weights"})
    (volume / ".ckpt/pins").mkdir(parents=True)
    frozen.mkdir()
    subprocess.run(["mount", "--bind", str(volume), str(frozen)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(frozen)], check=True)
        its = Volume(frozen)
        checkpoint = judge(its.examine("checkpoint-1"), Identity(Node(), "pod"))
        pin = its.pins.hold(checkpoint)
        assert not pin.held
        with pin.open("model") as fd:
            assert os.read(fd, 100) == b"weights"
    finally:
        subprocess.run(["umount", "-l", str(frozen)], check=True)
