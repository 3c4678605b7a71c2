"""``kubectl ckpt`` without a cluster: what it says, and its exit codes. With one: tests/cluster/test_kubectl_plugin.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sidecar.kubectl.main import main
from tests.ports import free_port

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig whose API server is not there."""
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{free_port()}"}}
    context = {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "research"}}
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "current-context": "here"}
    path = tmp_path / "config"
    path.write_text(json.dumps(config | {"users": [{"name": "u", "user": {}}]}))
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("HOME", str(tmp_path))


@needs_kubectl
@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("command", ["status", "save", "pause", "bundle"])
def test_a_cluster_that_does_not_answer_has_an_exit_code_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "job/run", "--json"]) == 6
    said = capsys.readouterr()
    assert "check --context and KUBECONFIG" in said.err
    assert said.err.count("\n") == 1
    assert json.loads(said.out)["exit_code"] == 6


@needs_kubectl
@pytest.mark.usefixtures("no_cluster")
def test_a_context_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "job/run", "--context", "other"]) == 2
    assert "'kubectl config get-contexts' lists them" in capsys.readouterr().err


def test_without_kubectl_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["status", "run"]) == 2
    assert "kubectl is not in PATH: install it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status"], "Missing argument 'JOB'"),
        (["status", "cronjob/run"], "'cronjob' is not one of trainjob, jobset, rayjob, job"),
        (["status", "job/"], "names no job: NAME or KIND/NAME"),
        (["stauts", "run"], "stauts"),
        (["save", "run", "--timeout", "soon"], "Invalid value for '--timeout'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("kubectl ckpt: ")
    assert said.count("\n") == 1


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kubectl-ckpt ")
