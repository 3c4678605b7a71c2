"""Checkpoints on the volume from which no run continues, although no sidecar answers: the sidecar would refuse them, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.lifecycle import volume_record
from sidecar.volume.boot import boot_id
from sidecar.volume.volume import Volume
from tests.hook.resuming.test_resumer import Asked, Failing, none_missing
from trainer_hook.contract import META_RESTORED, META_RESTORED_BOOT, RUNS, ListedFile, Marker
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.process.settings import from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.volume.checkpoint_folder import finish

A, B = VolumeRun("s3://b/a", "ns/a"), VolumeRun("s3://b/b", "ns/b")


def write(volume: Path, step: int, *, lists: bool = True, meta: dict[str, Any] | None = None) -> Path:
    folder = volume / f"checkpoint-{step}"
    folder.mkdir()
    (folder / "model").write_bytes(b"weights")
    finish(folder, Marker(step=step, files=(ListedFile("model", 7),) if lists else None, meta=meta or {}))
    return folder


@pytest.fixture(params=[Asked, Failing], ids=["no sidecar", "no store"])
def chosen(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def choose() -> str | None:
        settings = from_environment({"CKPT_DIR": str(tmp_path)})
        choice = Resumer(settings, request.param(tmp_path), RankConsensus(), missing=none_missing).choose(0)
        return choice.name if choice else None

    return choose


def test_a_checkpoint_of_another_run_on_the_volume(tmp_path: Path, chosen: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A second job on a persistent volume continued from the first one's checkpoint where the store did not answer."""
    volume = Volume(tmp_path)
    volume.prepare()
    volume_record.begin(volume, A)
    write(tmp_path, 50)
    volume_record.begin(volume, B)
    assert chosen() is None
    assert "checkpoint-50 is not used: another run left it" in capsys.readouterr().err
    write(tmp_path, 10)
    assert chosen() == "checkpoint-10"
    volume_record.begin(volume, A)
    assert chosen() == "checkpoint-50"


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"runs": 1}', b'{"runs": [1, 2]}', b'{"runs": [{}, {"versions": [1]}]}'])
def test_a_record_of_runs_that_is_malformed_says_nothing(tmp_path: Path, chosen: Any, content: bytes) -> None:
    write(tmp_path, 5)
    (tmp_path / ".ckpt").mkdir()
    (tmp_path / RUNS).write_bytes(content)
    assert chosen() == "checkpoint-5"


@pytest.mark.parametrize("lists", [True, False])
def test_a_checkpoint_that_was_written_to_after_its_marker(tmp_path: Path, chosen: Any, lists: bool) -> None:
    """A trainer that died while it rewrote a checkpoint in place left the old marker with new bytes of the same size."""
    write(tmp_path, 5)
    torn = write(tmp_path, 10, lists=lists)
    assert chosen() == "checkpoint-10"
    marked_ns = (torn / ".complete").stat().st_mtime_ns
    os.utime(torn / "model", ns=(marked_ns + 1, marked_ns + 1))
    assert chosen() == "checkpoint-5"


@pytest.mark.parametrize(("boot", "is_used"), [(boot_id(), True), ("an earlier one", False), ("", False)])
def test_a_download_of_an_earlier_run_of_the_kernel(tmp_path: Path, chosen: Any, boot: str, is_used: bool) -> None:
    """A download is not synchronized to the disk: a power failure leaves files of the right sizes, with zeros."""
    write(tmp_path, 5)
    write(tmp_path, 10, meta={META_RESTORED: "1f", META_RESTORED_BOOT: boot})
    assert chosen() == ("checkpoint-10" if is_used else "checkpoint-5")


def test_no_other_rank_continues_from_it_by_its_name(tmp_path: Path) -> None:
    """Where another pod's sidecar still uses the volume, that one is waited for instead."""
    settings = from_environment({"CKPT_DIR": str(tmp_path)})
    resumer = Resumer(settings, Asked(tmp_path), RankConsensus(), missing=none_missing)
    torn = write(tmp_path, 10)
    assert resumer._is_here("checkpoint-10", None)
    marked_ns = (torn / ".complete").stat().st_mtime_ns
    os.utime(torn / "model", ns=(marked_ns + 1, marked_ns + 1))
    assert not resumer._is_here("checkpoint-10", None)
