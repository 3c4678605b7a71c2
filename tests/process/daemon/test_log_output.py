"""A log that cannot be written: its lines are lost, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.sidecar_process import sidecar, until, write_checkpoint


@pytest.mark.parametrize("output", [">/dev/full", ">&-", "> >(head -n 1)"])
def test_a_sidecar_whose_log_cannot_be_written_goes_on(output: str, tmp_path: Path) -> None:
    within = ["bash", "-c", f'exec "$@" {output}', "bash"]
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}, within=within) as running:
        running.up()
        write_checkpoint(running.volume, "checkpoint-1", {"model": b"weights"}, {})
        until(lambda: (tmp_path / "store/checkpoint-1/.complete").exists())
        assert running.terminate() == 0
