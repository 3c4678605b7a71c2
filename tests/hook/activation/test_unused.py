"""A script in which the hook had nothing to save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ
from trainer_hook.activation.run_command import INJECT

SAVES = "from trainer_hook.plain import save; save(1, lambda folder: (folder / 'm').write_bytes(b'1'))"
MARKS = (
    "import os, pathlib; folder = pathlib.Path(os.environ['CKPT_DIR'], 'checkpoint-1'); folder.mkdir(); "
    "(folder / 'm').write_bytes(b'1'); (folder / '.complete').touch()"
)
IN_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SAVES!r}], check=True)"


PREFIX = (sys.executable, "-m", "trainer_hook", "run", "--")
OWN_LOOP = """
import torch

def main():
    model = torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), 0.1).step()

main()
"""


def run(code: str, volume: Path, prefix: tuple[str, ...] = PREFIX, **more: str) -> str:
    """Return the last line of the hook's log."""
    command = [*prefix, sys.executable, "-c", code]
    environ = plain_environ() | {"CKPT_DIR": str(volume), "CKPT_SIDECAR_URL": "http://127.0.0.1:9", "PYTHONPATH": str(ROOT)}
    environ |= {"CKPT_ON_STORE_FAILURE": "continue"} | more
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
def test_without_the_prefix_only_a_script_with_an_optimizer_is_told_so(tmp_path: Path) -> None:
    injected = {"PYTHONPATH": str(INJECT), "CKPT_HOOK": "auto"}
    assert "nothing was saved" in run(OWN_LOOP, tmp_path, (), **injected)
    assert run(OWN_LOOP, tmp_path, (), **injected, RANK="1") == ""
    assert run("import torch", tmp_path, (), **injected) == ""


@pytest.mark.slow
@pytest.mark.parametrize("code", [SAVES, IN_CHILD, MARKS], ids=["itself", "child", "its own marker"])
def test_a_script_that_saves_is_not(code: str, tmp_path: Path) -> None:
    assert "nothing was saved" not in run(code, tmp_path)
    assert (tmp_path / "checkpoint-1/.complete").exists()
