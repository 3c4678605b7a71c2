"""Each extra alone, in an environment of its own: the commands that it is for run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.conftest import PIP, ROOT, TOOLS, Built, done, run, working_copy
from tests.hook.job import plain_environ
from tests.ports import free_port

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
JOB = ROOT / "deploy/kubernetes/plain/job.yaml"
Bin = Callable[[str], Path]


@pytest.fixture
def installed(built: Built, tmp_path: Path) -> Callable[[str], Bin]:
    """Installs the wheel with extras into a new environment; returns where its programs lie."""

    def install(extras: str) -> Bin:
        folder = tmp_path / "venv"
        venv.create(folder, symlinks=True)
        into = [*PIP, "--python", folder / "bin/python", "install", "--no-compile"]
        done(*into, "--constraint", ROOT / "constraints.txt", f"{built.wheel}{extras}")
        return lambda name: folder / "bin" / name

    return install


def in_folder(folder: Path, *command: str | Path, code: int = 0, **settings: str) -> str:
    """Run a command outside the repository; return what it printed on both outputs."""
    environ = {name: value for name, value in plain_environ().items() if name != "PYTHONPATH"} | settings
    ended = run(*command, cwd=folder, env=environ)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return str(ended.stdout) + str(ended.stderr)


def test_alone_it_is_the_hook_and_says_what_else_to_install(installed: Callable[[str], Bin], tmp_path: Path) -> None:
    program = installed("")
    script = tmp_path / "script.py"
    script.write_text("import sys, trainer_hook; print('ran', sys.argv[1:], trainer_hook.__version__)")
    told = in_folder(tmp_path, program("python"), "-m", "trainer_hook", "run", "--", program("python"), script, "--flag", CKPT_DIR=str(tmp_path))
    assert f"ran ['--flag'] {done(ROOT / '.ci/version').strip()}" in told
    sidecar = program("checkpoint-sidecar")
    assert "start 'checkpoint-sidecar run'" in in_folder(tmp_path, sidecar, "status", CKPT_API_PORT="1", code=6)
    inject = [sidecar, "inject", "-f", JOB, "--store", "s3://bucket/run"]
    assert "pip install 'checkpoint-sidecar[inject]'" in in_folder(tmp_path, *inject, code=2)
    assert "pip install 'checkpoint-sidecar[kubectl]'" in in_folder(tmp_path, program("kubectl-ckpt"), "status", "run", code=2)
    assert "pip install 'checkpoint-sidecar[sidecar]'" in in_folder(tmp_path, sidecar, "doctor", "file:///tmp/x", code=2)


def test_inject_changes_a_manifest_as_the_sidecar_does(installed: Callable[[str], Bin], tmp_path: Path) -> None:
    program = installed("[inject]")
    options = ["-f", JOB, "--store", "s3://bucket/runs/{namespace}/{name}", "--secret", "data", "--grace", "120", "--install-hook"]
    made = in_folder(tmp_path, program("checkpoint-sidecar"), "inject", *options)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    expected = done(sys.executable, "-m", "sidecar", "inject", *options, env=environ)
    assert made.startswith(expected), "the warnings follow"
    assert "name: checkpoint-sidecar" in made
    assert "usage" in in_folder(tmp_path, program("checkpoint-sidecar"), "inject", "--help").lower()
    listing = "import importlib.metadata as m, json; print(json.dumps([found.name for found in m.distributions()]))"
    present = done(program("python"), "-c", listing)
    heavy = {"boto3", "botocore", "aiohttp", "fastapi", "awscrt", "structlog", "uvicorn"}
    assert not heavy & {name.lower() for name in json.loads(present)}


def test_kubectl_ckpt_reaches_for_the_cluster(installed: Callable[[str], Bin], tmp_path: Path) -> None:
    program = installed("[kubectl]")
    assert "status" in in_folder(tmp_path, program("kubectl-ckpt"), "--help")
    cluster = {"clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}], "current-context": "none"}
    cluster |= {"contexts": [{"name": "none", "context": {"cluster": "none", "user": ""}}]}
    (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config"} | cluster))
    ended = run(program("kubectl-ckpt"), "status", "job/run", env=plain_environ() | {"KUBECONFIG": str(tmp_path / "config")})
    said = "kubectl is not in PATH" if run("which", "kubectl").returncode else "check --context and KUBECONFIG"
    assert said in str(ended.stderr)


def test_the_facade_makes_a_train_job_durable(installed: Callable[[str], Bin], tmp_path: Path) -> None:
    program = installed("[kubeflow]")
    (tmp_path / "notebook.py").write_text(
        "from checkpoint_sidecar.kubeflow import durable\n"
        "from kubeflow.trainer import TrainerClient\n"
        "print(durable(store='s3:///runs/{name}', data_connection='data'))\n"
    )
    assert "Durable(given={'store': 's3:///runs/{name}'" in in_folder(tmp_path, program("python"), "notebook.py")


def test_the_sidecar_makes_a_checkpoint_durable(installed: Callable[[str], Bin], tmp_path: Path) -> None:
    program = installed("[sidecar]")
    volume, store, sidecar = tmp_path / "volume", tmp_path / "store", program("checkpoint-sidecar")
    (volume / "checkpoint-20").mkdir(parents=True)
    (volume / "checkpoint-20/weights.bin").write_bytes(b"weights")
    (volume / "checkpoint-20/.complete").touch()
    settings = {"CKPT_DIR": str(volume), "CKPT_STORE": f"file://{store}", "CKPT_API_PORT": str(free_port())}
    environ = plain_environ() | settings
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen([sidecar, "run"], env=environ, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 60
        while not (store / "checkpoint-20/.complete").exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert "checkpoint-20" in in_folder(tmp_path, sidecar, "ls", **settings)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        running.kill()
        running.wait()
    assert re.search(r"checkpoint-20 +committed", in_folder(tmp_path, sidecar, "ls", f"file://{store}"))
    in_folder(tmp_path, sidecar, "pull", f"file://{store}/checkpoint-20", tmp_path / "restored")
    assert (tmp_path / "restored/checkpoint-20/weights.bin").read_bytes() == b"weights"
    assert "store" in in_folder(tmp_path, sidecar, "webhook", "--help") + in_folder(tmp_path, sidecar, "doctor", "--help")


def test_the_lock_installs_and_runs_the_sidecar(built: Built, tmp_path: Path) -> None:
    """As Dockerfile.sidecar does it, but with uv: test_images.py builds that with pip."""
    venv.create(tmp_path / "venv", symlinks=True)
    install = [TOOLS / "uv", "pip", "install", "--quiet", "--python", tmp_path / "venv/bin/python"]
    done(*install, "--require-hashes", "--requirement", ROOT / "requirements-sidecar.lock")
    done(*install, "--no-deps", built.wheel)
    program = tmp_path / "venv/bin/checkpoint-sidecar"
    assert done(ROOT / ".ci/version").strip() in in_folder(tmp_path, program, "--version")
    checked = done(*PIP, "--python", tmp_path / "venv/bin/python", "check")
    assert "No broken requirements" in checked or not checked
    assert "venv is no run" in in_folder(tmp_path, program, "ls", f"file://{tmp_path}")


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_locked_package_has_a_wheel(index: None, python: str, machine: str, tmp_path: Path) -> None:
    where = ["--dry-run", "--target", tmp_path, "--python-version", python, "--python-platform", f"{machine}-manylinux_2_28"]
    locks = ["-r", ROOT / "requirements-sidecar.lock", "-r", ROOT / "requirements-build.lock"]
    done(TOOLS / "uv", "pip", "install", "--quiet", *where, "--only-binary", ":all:", "--require-hashes", *locks)


def test_the_locks_are_what_make_lock_makes(index: None, tmp_path: Path) -> None:
    names = working_copy("requirements-*.lock")
    before = {name: (ROOT / name).read_bytes() for name in names}
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "setup.py", "trainer_hook/__init__.py", *names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".tools").symlink_to(ROOT / ".tools")
    done("make", "lock", f"PYTHON={sys.executable}", cwd=tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in names} == before
