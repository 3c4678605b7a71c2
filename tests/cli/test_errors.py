"""What commands say where something is missing: one line, with the next step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sidecar import __version__
from tests.hook.job import ROOT, plain_environ
from tests.marks import slow


def command(
    *arguments: str, bare: bool = False, folder: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a command. ``bare``: as after ``pip install checkpoint-sidecar``, with the standard library alone."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)} | settings
    options = ["-S"] if bare else []
    run = [sys.executable, *options, "-m", "sidecar", *arguments]
    return subprocess.run(run, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["run"], "checkpoint-sidecar[sidecar]"),
        (["inject", "-f", "job.yaml", "--store", "s3://bucket/run"], "checkpoint-sidecar[inject]"),
        (["webhook"], "checkpoint-sidecar[sidecar]"),
    ],
)
def test_a_base_install_says_what_to_install(arguments: list[str], extra: str, tmp_path: Path) -> None:
    ended = command(*arguments, bare=True, CKPT_DIR=str(tmp_path), CKPT_STORE=f"file://{tmp_path}/store")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"checkpoint-sidecar {arguments[0]}: the package ")
    assert ended.stderr.endswith(f" is not installed: pip install '{extra}'\n")
    assert ended.stderr.count("\n") == 1


def test_a_base_install_tells_its_version_and_what_it_can_do() -> None:
    ended = command("--version", bare=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"checkpoint-sidecar {__version__}\n", "")
    for arguments in ([], ["--help"], ["status", "--help"]):
        ended = command(*arguments, bare=True)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert "pip install 'checkpoint-sidecar[sidecar]'; without it there are status, ls, " in ended.stderr


def test_a_start_imports_nothing_that_a_life_with_a_folder_as_store_never_needs(tmp_path: Path) -> None:
    settings = {"CKPT_DIR": str(tmp_path / "missing"), "CKPT_STORE": f"file://{tmp_path}/store", "CKPT_API_PORT": "0"}
    ended = command("run", **settings, PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if line.startswith("import time:")}
    assert "sidecar.daemon.daemon" in imported
    assert not {name for name in imported if name.startswith(("rich.", "boto3.", "botocore.", "ruamel.", "transformers."))}


def test_the_demo_says_what_to_install() -> None:
    run = [sys.executable, "-S", "-m", "examples.demo"]
    ended = subprocess.run(run, cwd=ROOT, env=plain_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("make demo: the package ")
    assert ended.stderr.endswith(" is not installed: pip install 'checkpoint-sidecar[demo]'\n")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["status"], ["ls"], ["probe"], ["drain"]])
def test_commands_that_only_ask_a_sidecar_need_nothing_installed(arguments: list[str], tmp_path: Path) -> None:
    ended = command(*arguments, bare=True, CKPT_DIR=str(tmp_path), CKPT_API_PORT="1")
    assert ended.returncode == (1 if arguments == ["probe"] else 6)
    assert "start 'checkpoint-sidecar run'" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("asking", ["show", "resume"])
@pytest.mark.parametrize("name", ["checkpoint-3O", *slow("", "nonsense", "../final", "checkpoint-007")])
def test_a_name_that_no_checkpoint_has_is_not_found(name: str, asking: str, tmp_path: Path) -> None:
    ended = command(asking, name, CKPT_DIR=str(tmp_path), CKPT_API_PORT="1")
    assert (ended.returncode, ended.stderr) == (
        5,
        f"checkpoint-sidecar {asking}: {name!r} is no checkpoint's name: checkpoint-<step> or final\n",
    )


@pytest.mark.parametrize("port", ["abc", "65536", "-1", "٣"])
def test_a_port_that_is_none_is_one_line(port: str, tmp_path: Path) -> None:
    ended = command("status", CKPT_DIR=str(tmp_path), CKPT_API_PORT=port)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert f"CKPT_API_PORT={port!r}: must be the port" in ended.stderr


def test_a_volume_that_was_not_named_is_said_to_be_the_default(tmp_path: Path) -> None:
    ended = command("run", CKPT_STORE=f"file://{tmp_path}/store", CKPT_API_PORT="0")
    assert ended.returncode == 2
    assert ended.stderr.startswith("checkpoint-sidecar: CKPT_DIR=/checkpoints (the default): No such file or directory: mount")


def test_a_volume_that_is_not_mounted_is_named_and_not_created(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    ended = command("run", CKPT_DIR=str(missing), CKPT_STORE=f"file://{tmp_path}/store", CKPT_API_PORT="0")
    assert ended.returncode == 2
    said = ended.stderr.splitlines()
    assert said[0].startswith(f"checkpoint-sidecar: CKPT_DIR={missing}: No such file or directory: mount the volume")
    assert len(said) == 1
    assert not missing.exists()
