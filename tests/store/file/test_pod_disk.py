"""A folder that is deleted with its container is told from one on a volume."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sidecar.store.file.store import IN_A_POD, FileStore, ends_with_container
from tests.mounts import small_volume
from tests.process.sidecar_process import sidecar

POD = {IN_A_POD: "10.96.0.1"}


def test_a_folder_of_the_containers_own_file_system_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    assert ends_with_container(tmp_path / "store", environ=POD, root=tmp_path)
    assert not ends_with_container(tmp_path / "store", environ={}, root=tmp_path), "a laptop's disk lasts"


def test_a_volume_that_is_mounted_there_lasts(tmp_path: Path) -> None:
    with small_volume(tmp_path / "mounted", "2m") as volume:
        assert not ends_with_container(volume, environ=POD, root=tmp_path)


@pytest.mark.skipif(Path(tempfile.gettempdir()).stat().st_dev != Path("/").stat().st_dev, reason="/tmp is a volume here")
def test_the_probe_and_the_log_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_A_POD, POD[IN_A_POD])
    assert FileStore(tmp_path / "store").probe().ends_with_container
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}", **POD}) as running:
        running.ready()
        [told] = running.events("store_ends_with_container")
        assert told["store"] == f"file://{tmp_path / 'store'}"
