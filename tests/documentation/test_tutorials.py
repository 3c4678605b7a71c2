"""The commands of each tutorial, as written, from nothing to a resume. Only the installation is left out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ports

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
DEEPSPEED = ROOT / ".deepspeed"
PROGRAMS = {
    "checkpoint-sidecar": "sidecar",
    "torchrun": "torch.distributed.run",
}


def commands(page: Path) -> str:
    """Return all blocks that a reader types, apart from those of the installation, which are marked sh."""
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))


def programs(folder: Path) -> Path:
    """Make a folder with the programs of this interpreter, as an activated environment has them."""
    folder.mkdir()
    for name, module in PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_lead_to_a_durable_checkpoint_and_a_resume(page: Path, tmp_path: Path) -> None:
    path = [str(ROOT)]
    if page.stem == "deepspeed":
        if not DEEPSPEED.is_dir() and find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed: make .deepspeed/.installed")
        path.append(str(DEEPSPEED))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")} | {
        "HOME": str(tmp_path),
        "PATH": f"{programs(tmp_path / 'bin')}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(path),
        "CKPT_API_PORT": str(ports.free_port()),
        "OMP_NUM_THREADS": "1",
    }
    shell = subprocess.Popen(
        ["bash", "-eu", "-o", "pipefail", "-c", commands(page)],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = shell.communicate(timeout=380)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    logs = "".join(f"\n== {log.name}\n{log.read_text()[-4000:]}" for log in tmp_path.rglob("*.log"))
    assert shell.returncode == 0, told + logs
    assert re.search(r"exit code 143", told), told + logs
    assert re.search(r"resumes from (checkpoint-|step )[1-9]", told), told + logs
    if page.stem != "shell":
        assert re.search(r"checkpoint-\d+ is durable", told), told
        assert re.search(r"trainer-2\.log:\[checkpoint\] everything is durable", told), told + logs
