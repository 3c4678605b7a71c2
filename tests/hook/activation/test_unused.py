"""A script under ``trainer_hook run`` in which the hook had nothing to save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ

SAVES = "from trainer_hook.plain import save; save(1, lambda folder: (folder / 'm').write_bytes(b'1'))"
IN_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAVES!r}], check=True)"


def run(code: str, volume: Path) -> str:
    """Return the last line of the hook's log."""
    command = [sys.executable, "-m", "trainer_hook", "run", "--", sys.executable, "-c", code]
    environ = plain_environ() | {"CKPT_DIR": str(volume), "CKPT_SIDECAR_URL": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    environ |= {"CKPT_ON_STORE_FAILURE": "continue"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("[checkpoint]")]
    return lines[-1] if lines else ""


@pytest.mark.parametrize("code", ["print('trained')", "import subprocess; subprocess.run(['true'])"])
def test_a_script_that_saves_nothing_is_told_so_at_its_end(code: str, tmp_path: Path) -> None:
    assert "nothing was saved: the script used no training library that the hook knows" in run(code, tmp_path)


@pytest.mark.parametrize("code", ["raise SystemError", "raise SystemExit(143)", "import os; os._exit(0)"])
def test_a_script_that_failed_has_other_troubles(code: str, tmp_path: Path) -> None:
    assert run(code, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("code", [SAVES, IN_CHILD], ids=["itself", "child"])
def test_a_script_that_saves_is_not(code: str, tmp_path: Path) -> None:
    assert "nothing was saved" not in run(code, tmp_path)
    assert (tmp_path / "checkpoint-1/.complete").exists()
