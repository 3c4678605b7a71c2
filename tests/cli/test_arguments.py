"""Arguments as users, manifests and kubelet write them: what is not known is refused in one line, and the probe stays lean."""

from __future__ import annotations

import inspect
import re
import resource
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import direct
from sidecar.cli.app import COMMANDS, invoke
from sidecar.cli.client import Unreachable
from sidecar.cli.direct import DIRECT
from sidecar.cli.main import main
from sidecar.core.format.durations import duration_s
from sidecar.kubernetes.inject.options import FLAGS
from tests.hook.job import ROOT, plain_environ

NEEDED = {
    "show": ["checkpoint-1"],
    "limit": ["none"],
    "install-hook": ["hook"],
    "inject": ["-f", "-"],
    "verify": ["s3://b/checkpoint-1"],
    "pull": ["s3://b/checkpoint-1", "."],
    "push": [".", "s3://b"],
    "rm": ["s3://b/checkpoint-1"],
    "prune": ["s3://b", "--keep", "1"],
    "completion": ["bash"],
}
"""Arguments without which a command is refused anyway."""


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([command, "--help"]) == 0
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("command", "is_newest"), [("pull", True), ("verify", True), ("rm", False), ("bad release", False)])
def test_only_commands_that_take_a_prefix_offer_its_newest_checkpoint(
    command: str, is_newest: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert ("of a prefix alone, the newest" in " ".join(capsys.readouterr().out.split())) == is_newest


@pytest.mark.parametrize("command", ["flush", "resume", "save"])
def test_the_default_of_a_timeout_is_shown_as_a_person_writes_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    function = getattr(import_module(f"sidecar.cli.{COMMANDS[command]}"), command)
    assert main([command, "--help"]) == 0
    [shown] = re.findall(r"how long to wait, such as 90s or 2m \(default: (\w+)\)", " ".join(capsys.readouterr().out.split()))
    assert duration_s(shown) == inspect.signature(function).parameters["timeout_s"].default


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_that_are_not_known_and_abbreviations_are_refused_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = flags_of(command, capsys)
    assert "--help" in known
    cut = [flag[:-1] for flag in known if flag != "--help" and flag[:-1] not in known]
    for wrong in ["--bogus", "-x", *cut]:
        assert main([command, *NEEDED.get(command, []), wrong]) == 2, wrong
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"checkpoint-sidecar {command}: No such option: {wrong}")
        assert err.endswith(f"see 'checkpoint-sidecar {command} --help'\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["stat"],
        ["show"],
        ["show", "a", "b"],
        ["ls", "--where", "moon"],
        ["resume", "--timeout", "soon"],
        ["status", "--watch=1"],
        ["inject"],
        ["webhook", "--port", "x"],
        ["demo"],
    ],
    ids=" ".join,
)
def test_arguments_that_are_missing_or_not_valid_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_inject_has_every_flag_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    known = set(flags_of("inject", capsys))
    assert {f"--{flag.name}" for flag in FLAGS} | {"--filename", "--in-place", "--diff", "--set", "--help"} == known


class Recorder:
    """A client that notes what it was asked."""

    asked: list[Any]

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self.asked.append(timeout_s)

    def get(self, path: str) -> Any:
        self.asked.append(path)
        return {"status": "ok"}

    post = get


@pytest.mark.parametrize("spelling", DIRECT, ids=" ".join)
def test_a_command_that_runs_without_typer_is_the_one_that_typer_runs(
    spelling: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Recorder, "asked", asked, raising=False)
    monkeypatch.setattr(direct, "Client", Recorder)
    monkeypatch.setattr(direct, "print_answer", lambda *_, as_json: asked.append(as_json) or 0)
    monkeypatch.setattr("sidecar.cli.run.run", lambda: asked.append("run") or 0)
    assert DIRECT[spelling]() == 0
    by_itself = asked.copy()
    asked.clear()
    assert invoke(spelling) == 0
    assert asked == by_itself != []


def test_the_probe_imports_little_and_takes_little(tmp_path: Path) -> None:
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(tmp_path), "CKPT_API_PORT": "1"}
    look = "import sys; from sidecar.cli.main import main; code = main(['probe']); print(code, *sys.modules)"
    shown = subprocess.run([sys.executable, "-S", "-c", look], env=environ, capture_output=True, text=True, check=True)
    code, *modules = shown.stdout.split()
    assert code == "1"
    assert "sidecar.cli.client" in modules
    assert {"typer", "rich", "pydantic", "asyncio", "ssl", "http.client", "email"}.isdisjoint(modules)
    # Beside other tests it takes more now and then.
    assert any(_cpu_s([sys.executable, "-m", "sidecar", "probe"], environ) < 0.15 for _ in range(20))


def test_a_probe_waits_for_a_sidecar_that_starts(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # taken, and refuses connections until it listens
        environ = plain_environ() | {"CKPT_DIR": str(tmp_path), "CKPT_API_PORT": str(server.getsockname()[1])}
        probing = subprocess.Popen([sys.executable, "-m", "sidecar", "probe"], env=environ, cwd=ROOT)
        time.sleep(0.5)
        assert probing.poll() is None
        server.listen()
        server.settimeout(20)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(4096).startswith(b"GET /healthz ")
            connection.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"status": "ok"}')
        assert probing.wait(20) == 0


def _cpu_s(command: list[str], environ: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 1
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_ctrl_c_and_a_closed_pipe_end_a_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for raised, code in ((KeyboardInterrupt, 130), (BrokenPipeError, 1)):

        def ends(*_: Any, raised: type[BaseException] = raised, **__: Any) -> int:
            raise raised

        monkeypatch.setattr(direct, "status", ends)
        assert main(["status", "--watch"]) == code
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_client_is_the_same_through_typer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(**_: Any) -> int:
        raise Unreachable("no sidecar answers")

    monkeypatch.setattr(direct, "status", ends)
    assert main(["status", "--watch"]) == 6
    assert capsys.readouterr().err == "checkpoint-sidecar status: no sidecar answers\n"


def test_each_command_says_in_one_whole_line_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([]) == 0
    said = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert len(said) == len(COMMANDS)
    assert [line for line in said if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("rate", ["200MBs", "0", "fast"])
def test_a_rate_that_is_none_is_told_before_the_sidecar_is_asked(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limit", rate]) == 2
    assert f"RATE='{rate}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["statsu"], ": No such command 'statsu'. Did you mean 'status'? See 'checkpoint-sidecar --help'"),
        (["plan", "storag"], " plan: No such command 'storag'. Did you mean 'storage'? See 'checkpoint-sidecar plan --help'"),
        (
            ["plan", "storage", "--strategy", "dpp"],
            " plan: Invalid value for '--strategy': 'dpp' is not one of 'ddp', 'fsdp', 'zero3-lora': "
            "see 'checkpoint-sidecar plan storage --help'",
        ),
        (
            ["completion"],
            " completion: Missing argument 'shell'. Choose from: bash, zsh, fish: see 'checkpoint-sidecar completion --help'",
        ),
    ],
)
def test_what_is_misspelt_is_answered_with_the_next_step(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"checkpoint-sidecar{said}\n"
