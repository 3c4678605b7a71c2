"""Commands whose standard output or standard error is full or closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ
from tests.marks import slow

FULL = "standard output cannot be written: No space left on device"


def redirected(redirection: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``python -m`` under a redirection of the shell."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": "/nonexistent", "CKPT_API_PORT": "1"}
    script = f'set -o pipefail; "$@" {redirection}'
    run = ["bash", "-c", script, "bash", sys.executable, "-m", *command]
    return subprocess.run(run, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with one checkpoint, whose listing is longer than a buffer."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "checkpoint-1").mkdir()
    for number in range(300):
        (folder / f"checkpoint-1/shard-{number:05}-of-a-model-that-has-many.bin").write_bytes(b"x")
    address = f"file://{folder}/store"
    (folder / "store").mkdir()
    assert redirected("", "sidecar", "push", str(folder / "checkpoint-1"), address).returncode == 0
    return address


@pytest.mark.parametrize(
    "command",
    [
        *("--help", "ls STORE"),
        *slow("--version", "completion bash", "plan cost", "ls STORE --json", "show STORE/checkpoint-1 --json"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_and_exit_code_1(command: str, store: str) -> None:
    arguments = command.replace("STORE", store).split()
    said = "" if command.startswith("-") else f" {arguments[0]}"
    ended = redirected("> /dev/full", "sidecar", *arguments)
    assert (ended.returncode, ended.stderr) == (1, f"checkpoint-sidecar{said}: {FULL}\n")
    ended = redirected("| head -n 0", "sidecar", *arguments)
    assert (ended.returncode, ended.stderr) == (1, "")
    ended = redirected(">&-", "sidecar", *arguments)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("redirection", ["> /dev/full", *slow(">&-", ">&- 2>&- <&-", "2> /dev/full")])
def test_a_download_ends_whatever_can_be_printed(redirection: str, store: str, tmp_path: Path) -> None:
    ended = redirected(redirection, "sidecar", "pull", store, str(tmp_path))
    assert ended.returncode == (redirection == "> /dev/full"), ended.stderr
    assert len([*tmp_path.glob("checkpoint-1/shard-*")]) == 300


@pytest.mark.parametrize("redirection", ["> /dev/full", *slow("2> /dev/full", "> /dev/full 2>&1", ">&- 2>&-", "| head -n 0")])
@pytest.mark.parametrize(("command", "code"), [(("status", "--json"), 6), (("run",), 2), (("status", "--typo", "--json"), 2)])
def test_the_exit_code_of_an_error_stays(command: tuple[str, ...], code: int, redirection: str) -> None:
    ended = redirected(redirection, "sidecar", *command)
    assert ended.returncode == code
    assert ended.stderr.count("\n") == ("2>" not in redirection)


def test_kubectl_ckpt_says_it_in_one_line_too() -> None:
    run = "import sys; from sidecar.kubectl.main import main; sys.exit(main())"
    script = f'"{sys.executable}" -c "{run}" --help > /dev/full'
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, f"kubectl ckpt: {FULL}\n")
