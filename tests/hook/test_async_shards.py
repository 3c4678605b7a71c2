"""Sharded state that is written beside training: whole and of one instant, or no rank takes it for a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ
from tests.process.sidecar_process import free_port


@pytest.mark.slow
def test_what_goes_wrong_on_one_rank_goes_wrong_on_all_and_nobody_hangs(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    script = [f"--master_port={free_port()}", str(ROOT / "tests/hook/scripts/shards.py"), str(tmp_path)]
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*launcher, *script], env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    for name, like in (("beside", "blocking"), ("mixed", "blocking-2"), ("again", "blocking-3")):
        for rank in range(2):
            file = f"sharded/__{rank}_0.distcp"
            assert (tmp_path / name / file).read_bytes() == (tmp_path / like / file).read_bytes()
        assert (tmp_path / name / "sharded/.metadata").is_file()
