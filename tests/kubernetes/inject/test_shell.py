"""What is said of a shell's exit code is held against real shells, in which the trainer ends as a preempted one does."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from sidecar.kubernetes.inject.exit_codes import ends_otherwise, keeps_signals, swallowed
from sidecar.kubernetes.inject.shell import commands, shell_of
from tests.process.sidecar_process import until

OF_XPK = (
    "echo begin; _sigterm() ( kill -SIGTERM $! 2>/dev/null;); trap _sigterm SIGTERM; (torchrun t.py --steps 9) & PID=$!; "
    "while kill -0 $PID 2>/dev/null; do sleep 0.1; done; wait $PID; EXIT_CODE=$?; echo $EXIT_CODE; exit $EXIT_CODE"
)
"""How xpk wraps the command of each training on GKE."""
HANDED_ON = [
    OF_XPK,
    "torchrun t.py",
    "exec torchrun t.py",
    "cd / && torchrun t.py",
    "true; torchrun t.py --x 'a | b || c; d & e'",
    'torchrun t.py --note "a | b" --f "$(echo 1 | cat)" # | tee log',
    "torchrun t.py 2>&1 > /dev/null",
    "torchrun t.py > /dev/null 2>&1",
    "torchrun t.py &> /dev/null",
    "set -o pipefail; torchrun t.py | cat",
    "set -euo pipefail\ntorchrun t.py 2>&1 | tee /dev/null",
    "set -eo pipefail\ntorchrun t.py | cat\necho done",
    "echo x | torchrun t.py",
    "echo x | cat | torchrun t.py",
    "set -e; torchrun t.py; echo done",
    "set -e\n\ntorchrun \\\n  t.py\necho done\n",
    "torchrun t.py && echo done",
    "true && torchrun t.py && echo done",
    "torchrun t.py; exit $?",
    "torchrun t.py\nrc=$?\necho $rc\nexit $rc",
    "torchrun t.py | cat; exit ${PIPESTATUS[0]}",
    "torchrun t.py || exit $?",
    'torchrun t.py || { rc=$?; echo "failed $rc"; exit $rc; }',
    "torchrun t.py && echo done; exit $?",
    "exec torchrun t.py || true",
    "torchrun t.py & wait $!; exit $?",
    "torchrun t.py & wait $!",
    "torchrun t.py &\npid=$!\nwait $pid",
    "{ true && torchrun t.py; } & wait $!",
    "if true; then torchrun t.py; fi",
    "if true; then torchrun t.py; else echo other; fi",
    "if torchrun t.py; then exit 0; else exit $?; fi",
    "if torchrun t.py; then echo good; else rc=$?; echo $rc; exit $rc; fi",
    "(torchrun t.py)",
    "{ torchrun t.py; }",
    "cat <<EOF\ntorchrun t.py | cat\nEOF\ntorchrun t.py",
    "exec > >(cat) 2>&1; exec torchrun t.py",
    "timeout 10 torchrun t.py",
    "A=1 B='x y' torchrun t.py",
    "torchrun t.py --pipe \\| cat",
    "trap 'echo bye' EXIT; torchrun t.py",
    "trap 'exit 0' EXIT; exec torchrun t.py",
    "train() { torchrun t.py; }\ntrain",
    "train() { torchrun t.py | cat; }; torchrun t.py",
    "set -o pipefail; train() { torchrun t.py | cat; }; train",
    "train() { torchrun t.py; }; train & wait $!",
    "eval 'torchrun t.py'",
    "set -o pipefail; eval 'torchrun t.py | cat'",
    "bash -o pipefail -c 'torchrun t.py | cat'",
    "torchrun t.py --shell bash -c config.yaml",
]
SWALLOWED = [
    "torchrun t.py | tee /dev/null",
    "torchrun t.py 2>&1 | tee /dev/null",
    "torchrun t.py |& tee /dev/null",
    "set -e; torchrun t.py | tee /dev/null",
    "set -e -o pipefail; set +o pipefail; torchrun t.py | cat",
    "(torchrun t.py) | cat",
    "{ torchrun t.py; } 2>&1 | cat",
    "( cd / && torchrun t.py ) 2>&1 | cat",
    "torchrun t.py | cat; exit $?",
    "{ exec torchrun t.py; } | cat",
    "(torchrun t.py) || true",
    "torchrun t.py & exit $?",
    "torchrun t.py || true",
    "torchrun t.py || :",
    "torchrun t.py || echo failed",
    "torchrun t.py || exit 1",
    "torchrun t.py && echo good || echo bad",
    "true && torchrun t.py && echo good && echo again || exit 1",
    "if torchrun t.py; then exit 0; else echo bad; fi",
    "if ! torchrun t.py; then exit 1; else exit $?; fi",
    "set -e; torchrun t.py || true",
    "torchrun t.py; true",
    "torchrun t.py\necho done\n",
    "torchrun t.py; exit 0",
    "torchrun t.py; sleep 0",
    "torchrun t.py &",
    "torchrun t.py & wait",
    "torchrun t.py & echo started",
    "(torchrun t.py) & wait",
    "(torchrun t.py; true) & wait $!",
    "! torchrun t.py",
    "if torchrun t.py; then echo good; fi",
    "if ! torchrun t.py; then echo bad; fi",
    "set -e; torchrun t.py && echo good; echo done",
    "torchrun t.py && echo good; echo done",
    "trap 'exit 0' EXIT; torchrun t.py",
    "{ torchrun t.py; echo done; }",
    "(torchrun t.py; true)",
    "if true; then torchrun t.py; echo after; fi",
    "for i in 1 2; do torchrun t.py; done; echo done",
    "set -euo pipefail; torchrun t.py | cat || true",
    "{ torchrun t.py; } || true",
    "set -e; { torchrun t.py; echo done; } || true",
    "train() { torchrun t.py | cat; }; train",
    "train()\n{\n  torchrun t.py\n  echo done\n}\ntrain",
    "function train { torchrun t.py; echo done; }; train",
    "function train() { torchrun t.py; }; train || true",
    "set -e; train() { torchrun t.py; echo done; }; train || true",
    "main() { train; }; train() { torchrun t.py; true; }; main",
    "eval 'torchrun t.py | cat'",
    "bash -c 'torchrun t.py | cat'",
    "echo begin; set -o pipefail; timeout 10 bash -c 'torchrun t.py | cat'",
    "trap end EXIT; end() { echo bye; exit 0; }; torchrun t.py",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bin")
    trainer = folder / "torchrun"
    trainer.write_text("#!/bin/sh\ncat > /dev/null < /dev/null\nexit 143\n")
    trainer.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def code_of(words: list[str], path: str) -> int:
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    return done.returncode


@pytest.mark.parametrize(
    ("script", "is_swallowed"), [(script, False) for script in HANDED_ON] + [(script, True) for script in SWALLOWED]
)
def test_it_is_said_whether_the_exit_code_gets_through_as_a_shell_does_it(script: str, is_swallowed: bool, path: str) -> None:
    words = ["bash", "-c", script]
    shell = shell_of(words)
    assert shell is not None
    assert (code_of(words, path) != 143) is is_swallowed
    assert ((swallowed(shell) or ends_otherwise(shell)) is not None) is is_swallowed, swallowed(shell)


@pytest.mark.parametrize(
    ("words", "is_swallowed"),
    [
        (["bash", "-o", "pipefail", "-c"], False),
        (["bash", "-eo", "pipefail", "-c"], False),
        (["bash", "-euxo", "pipefail", "-c"], False),
        (["bash", "-c", "-o", "pipefail"], False),
        (["/bin/bash", "--norc", "-o", "pipefail", "-ec"], False),
        (["bash", "-ec"], True),
        (["/usr/bin/env", "bash", "-c"], True),
        (["timeout", "10", "bash", "-c"], True),
        (["nice", "-n", "1", "sh", "-c"], True),
        (["env", "-u", "A", "stdbuf", "-oL", "bash", "-o", "pipefail", "-c"], False),
        (["bash", "-c", "--"], True),
    ],
)
def test_options_of_the_shell_itself_count(words: list[str], is_swallowed: bool, path: str) -> None:
    whole = [*words, "torchrun t.py | cat"]
    shell = shell_of(whole)
    assert shell is not None
    assert (code_of(whole, path) != 143) is is_swallowed
    assert (swallowed(shell) is not None) is is_swallowed


@pytest.mark.parametrize(
    "words", [[], ["torchrun", "t.py"], ["bash", "train.sh"], ["python", "-c", "a | b"], ["bash"], ["bash", "-c"], ["sh", "-x"]]
)
def test_what_runs_no_script_is_left_alone(words: list[str]) -> None:
    assert shell_of(words) is None


@pytest.mark.parametrize(
    ("script", "keeps"),
    [
        ("torchrun t.py", False),
        ("exec torchrun t.py", False),
        ("cd /x && exec torchrun t.py", False),
        ("cd /x && torchrun t.py", True),
        ("torchrun t.py | tee log", True),
        ("exec torchrun t.py | tee log", True),
        ("torchrun t.py & wait $!", True),
        ("trap 'echo' TERM; torchrun t.py", True),
        ("trap 'kill -TERM $pid' TERM\ntorchrun t.py", True),
        ("torchrun t.py &\npid=$!\ntrap 'kill -TERM $pid; wait $pid' TERM\nwait $pid", False),
        (OF_XPK, False),
    ],
)
def test_it_is_said_whether_sigterm_gets_through(script: str, keeps: bool) -> None:
    shell = shell_of(["bash", "-c", script])
    assert shell is not None
    assert keeps_signals(shell) is keeps


def test_no_script_makes_it_fail(tmp_path: Path) -> None:
    for script in (
        "'",
        '"',
        "$(",
        "`",
        "a <<",
        "((",
        ")",
        "| |",
        "if",
        "done",
        "\\",
        "trap",
        "set",
        "wait",
        "&",
        "a () {",
        "case x in a) b;; esac",
    ):
        shell = shell_of(["bash", "-c", script])
        if shell is not None:
            swallowed(shell)
            keeps_signals(shell)
            ends_otherwise(shell)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("trap 'exit 0' TERM; torchrun t.py", 0),
        ("trap 'exit 0' SIGTERM; torchrun t.py & wait $!", 0),
        ("end() { kill $pid; wait $pid; exit 0; }\ntrap end TERM\ntorchrun t.py &\npid=$!\nwait $pid", 0),
        ("trap 'kill $pid; wait $pid; exit 1' 15; torchrun t.py & pid=$!; wait $pid", 1),
        ("trap 'kill $pid; wait $pid; exit $?' TERM; torchrun t.py & pid=$!; wait $pid", 143),
        ("trap 'kill $pid; wait $pid; exit 143' TERM; torchrun t.py & pid=$!; wait $pid", 143),
        ("trap 'exit 0' INT; torchrun t.py & wait $!", 143),
    ],
)
def test_a_trap_that_ends_the_shell_with_another_code_is_seen(script: str, code: int, tmp_path: Path) -> None:
    trainer = tmp_path / "torchrun"
    trainer.write_text(f"#!/bin/bash\ntrap 'exit 143' TERM\ntouch {tmp_path}/started\nsleep 60 & wait $!\n")
    trainer.chmod(0o755)
    words = ["bash", "-c", script]
    shell = shell_of(words)
    assert shell is not None
    assert (ends_otherwise(shell) is None) is (code == 143)
    with subprocess.Popen(words, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, start_new_session=True) as process:
        until((tmp_path / "started").exists)
        # As a preemption: to the shell alone where it passes it on, else to the trainer, too, which would run on for ever.
        (os.kill if "kill" in script else os.killpg)(process.pid, signal.SIGTERM)
        assert process.wait(60) in ((code, -signal.SIGTERM) if code == 143 else (code,))


def test_functions_that_call_each_other_for_ever_cost_little() -> None:
    script = "a() { " + "b; " * 500 + "}; b() { " + "a; " * 500 + "torchrun t.py; }; a"
    shell = shell_of(["bash", "-c", script])
    assert shell is not None
    assert len(commands(script)) < 3000
    swallowed(shell)
