"""The commands of each tutorial, as written, from nothing to a resume. Only the installation is left out."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
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


def environment(folder: Path, *more: str) -> dict[str, str]:
    """Return what a reader's shell has: our programs, a home, and no settings."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
    return own | {
        "HOME": str(folder),
        "PATH": f"{programs(folder / 'bin')}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join([str(ROOT), *more]),
        "CKPT_API_PORT": str(ports.free_port()),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_lead_to_a_durable_checkpoint_and_a_resume(page: Path, tmp_path: Path) -> None:
    more = []
    if page.stem == "deepspeed":
        if not DEEPSPEED.is_dir() and find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed: make .deepspeed/.installed")
        more.append(str(DEEPSPEED))
    shell = subprocess.Popen(
        ["bash", "-eu", "-o", "pipefail", "-c", commands(page)],
        env=environment(tmp_path, *more),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = shell.communicate(timeout=380)
    finally:
        end(shell)
    logs = "".join(f"\n== {log.name}\n{log.read_text()[-4000:]}" for log in tmp_path.rglob("*.log"))
    assert shell.returncode == 0, told + logs
    assert re.search(r"exit code 143", told), told + logs
    assert re.search(r"resumes from (checkpoint-|step )[1-9]", told), told + logs
    if page.stem != "shell":
        assert re.search(r"checkpoint-\d+ is durable", told), told
        assert re.search(r"trainer-2\.log:\[checkpoint\] everything is durable", told), told + logs


def test_the_shell_script_does_not_begin_anew_where_no_sidecar_answers(tmp_path: Path) -> None:
    [script] = re.findall(r"cat > train.sh <<'EOF'\n(.*?)^EOF", commands_of("shell"), re.DOTALL | re.MULTILINE)
    environ = environment(tmp_path) | {"CKPT_DIR": str(tmp_path)}
    ended = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "no sidecar answers" in ended.stderr
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("sidecar", ["exit 2", "exec sleep 0.4", "trap 'exit 0' TERM; sleep 60 & wait"])
def test_the_script_for_a_node_of_slurm_has_the_exit_code_of_a_trainer_that_sigterm_ends(sidecar: str, tmp_path: Path) -> None:
    """Also where the sidecar has died before: the job is requeued at 143 alone."""
    (tmp_path / "node.sh").write_text(script_of_slurm())
    for name, script in {"checkpoint-sidecar": sidecar, "python": "exec sleep 60"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CKPT_DIR": str(tmp_path / "volume")}
    for _ in range(3):
        shell = started(tmp_path, environ)
        try:
            time.sleep(1)
            os.killpg(shell.pid, signal.SIGTERM)
            told, _ = shell.communicate(timeout=30)
        finally:
            end(shell)
        assert shell.returncode == 143, told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_for_a_node_of_slurm_saves_when_all_processes_get_sigterm_and_resumes(tmp_path: Path) -> None:
    [training] = re.findall(r"cat > train.py <<'EOF'\n(.*?)^EOF", commands_of("pytorch"), re.DOTALL | re.MULTILINE)
    (tmp_path / "node.sh").write_text(script_of_slurm())
    (tmp_path / "train.py").write_text(training)
    (tmp_path / "store").mkdir()
    environ = environment_of_slurm(tmp_path) | {"CKPT_NODE_INDEX": "0", "CKPT_NODE_COUNT": "1"}
    first = started(tmp_path, environ)
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("step 3 "):
                break
        os.killpg(first.pid, signal.SIGTERM)  # Slurm signals every process of the step
        told, _ = first.communicate(timeout=120)
    finally:
        end(first)
    assert first.returncode == 143, told
    assert "not everything is durable" not in told
    shutil.rmtree(tmp_path / "volume")
    second = started(tmp_path, environ)
    try:
        told, _ = second.communicate(timeout=150)
    finally:
        end(second)
    assert second.returncode == 0, told
    assert re.search(r"resumes from checkpoint-[1-9]", told), told
    assert "not everything is durable" not in told


def environment_of_slurm(folder: Path) -> dict[str, str]:
    """Return what ``train.sbatch`` exports."""
    return environment(folder) | {
        "CKPT_DIR": str(folder / "volume"),
        "CKPT_STORE": f"file://{folder}/store",
        "CKPT_GRACE_SECONDS": "60",
        "CKPT_MODE": "classic",
        "CKPT_RUN_ID": "llama",
    }


def script_of_slurm() -> str:
    page = (ROOT / "docs/how-to/slurm.md").read_text()
    [script] = re.findall(r"^```text\n(#!/bin/bash\n# The sidecar.*?)^```", page, re.DOTALL | re.MULTILINE)
    return str(script)


def commands_of(tutorial: str) -> str:
    return commands(ROOT / f"docs/tutorials/{tutorial}.md")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tasks_of_slurm_that_are_ranks_share_the_sidecar_of_their_node(tmp_path: Path) -> None:
    (tmp_path / "node.sh").write_text(script_of_slurm())
    shutil.copy(ROOT / "examples/train_hf.py", tmp_path / "train.py")
    (tmp_path / "store").mkdir()
    environ = environment_of_slurm(tmp_path) | {
        "CKPT_SAVE_STEPS": "5",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }

    def tasks() -> list[subprocess.Popen[str]]:
        job = environ | {"MASTER_PORT": str(ports.free_port())}
        return [started(tmp_path, job | dict.fromkeys(("SLURM_LOCALID", "RANK", "LOCAL_RANK"), str(rank))) for rank in (0, 1)]

    running = tasks()
    try:
        while not (tmp_path / "store/checkpoint-5/.complete").exists():
            assert all(task.poll() is None for task in running)
            time.sleep(0.05)
        for task in running:
            os.killpg(task.pid, signal.SIGTERM)
        told = [task.communicate(timeout=120)[0] for task in running]
    finally:
        for task in running:
            end(task)
    assert [task.returncode for task in running] == [143, 143], told
    assert "not everything is durable" not in told[0]
    assert [text.count("sidecar_started") for text in told] == [1, 0]
    shutil.rmtree(tmp_path / "volume")
    running = tasks()
    try:
        told = [task.communicate(timeout=150)[0] for task in running]
    finally:
        for task in running:
            end(task)
    assert [task.returncode for task in running] == [0, 0], told
    assert re.search(r"resumes from checkpoint-[1-9]", told[0]), told[0]


def started(folder: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "node.sh", "python", "train.py"],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(shell: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
