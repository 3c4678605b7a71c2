"""The hook's settings and run command: errors for wrong values, and the environment of the command."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ
from trainer_hook.activation.run_command import (
    INJECT,
    _is_torchrun,
    deepspeed_warning,
    environment_for,
    shutdown_warning,
    torch_reads_variable,
)
from trainer_hook.contract import KNOWN_SETTINGS
from trainer_hook.process.settings import SettingError, Settings, from_environment, ignored_setting


def test_nothing_set_gives_the_defaults() -> None:
    assert from_environment({}) == Settings()


def test_empty_means_not_set() -> None:
    assert from_environment(dict.fromkeys(KNOWN_SETTINGS, "  ")) == Settings()


def test_variables_of_others_are_not_looked_at() -> None:
    assert from_environment({"SAVE_STEPS": "x", "ckpt_save_steps": "y", "XCKPT_DIR": "z"}) == Settings()


def test_a_pod_template_may_set_the_sidecars_variables_here_too() -> None:
    assert from_environment({"CKPT_STORE": "s3://bucket/run", "CKPT_KEEP_LOCAL": "2"}) == Settings()


def test_everything_that_is_set_is_read() -> None:
    read = from_environment(
        {
            "CKPT_DIR": "/volume",
            "CKPT_SAVE_STRATEGY": "epoch",
            "CKPT_SAVE_STEPS": "7",
            "CKPT_SAVE_MINUTES": "0.5",
            "CKPT_SAVE_TOTAL_LIMIT": "3",
            "CKPT_JIT": "off",
            "CKPT_ASYNC": "Yes",
            "CKPT_RESUME_TIMEOUT_S": "12",
            "CKPT_API_PORT": "1234",
            "CKPT_ON_STORE_FAILURE": "fail",
            "CKPT_PREEMPTED_EXIT_CODE": "75",
            "CKPT_GRACE_SECONDS": "60",
        }
    )
    assert read == Settings(
        dir=Path("/volume"),
        save_strategy="epoch",
        save_steps=7,
        save_minutes=0.5,
        save_total_limit=3,
        jit=False,
        asynchronous=True,
        resume_timeout_s=12,
        sidecar_url="http://127.0.0.1:1234",
        fail_without_store=True,
        preempted_exit_code=75,
        grace_seconds=60,
    )


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        ({}, "minutes"),
        ({"CKPT_SAVE_STEPS": "5"}, "steps"),
        ({"CKPT_SAVE_STEPS": "5", "CKPT_SAVE_MINUTES": "5"}, "minutes"),
        ({"CKPT_SAVE_STEPS": "5", "CKPT_SAVE_STRATEGY": "no"}, "no"),
    ],
)
def test_the_strategy_follows_from_what_is_set(given: dict[str, str], strategy: str) -> None:
    assert from_environment(given).save_strategy == strategy


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CKPT_SAVE_STEP", "5", "did you mean CKPT_SAVE_STEPS?"),
        ("CKPT_XYZZY_PLUGH_FOO", "5", "no setting has a similar name"),
        ("CKPT_SAVE_STEPS", "0", "a whole number from 1 on"),
        ("CKPT_SAVE_STEPS", "1e3", "a whole number from 1 on"),
        ("CKPT_SAVE_STEPS", "²", "a whole number from 1 on"),
        ("CKPT_SAVE_MINUTES", "0", "a number greater than 0"),
        ("CKPT_SAVE_MINUTES", "nan", "a number greater than 0"),
        ("CKPT_SAVE_MINUTES", "inf", "a number greater than 0"),
        ("CKPT_SAVE_STRATEGY", "often", "one of steps, epoch, minutes, no"),
        ("CKPT_SAVE_TOTAL_LIMIT", "-1", "a whole number from 1 on"),
        ("CKPT_JIT", "maybe", "true or false"),
        ("CKPT_API_PORT", "65536", "a whole number from 1 to 65535"),
        ("CKPT_PREEMPTED_EXIT_CODE", "256", "a whole number from 0 to 255"),
        ("CKPT_SIDECAR_URL", "127.0.0.1:9470", "a URL such as http://127.0.0.1:9470"),
        ("CKPT_ON_STORE_FAILURE", "panic", "one of continue, fail"),
        ("CKPT_DIR", "relative/path", "an absolute path"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it_and_what_it_may_be(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingError) as caught:
        from_environment({name: value})
    assert str(caught.value).startswith(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def launch(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer_hook", *arguments]
    environment = plain_environ() | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"CKPT_SAVE_STEP": "5"}, "did you mean CKPT_SAVE_STEPS?"),
        ({"CKPT_SAVE_STEPS": "many"}, "CKPT_SAVE_STEPS='many' must be a whole number"),
        ({"CKPT_DIR": "/no/such/folder"}, "CKPT_DIR=/no/such/folder is not a directory: mount the shared volume there\n"),
        ({"CKPT_DIR": ""}, "CKPT_DIR=/checkpoints (the default) is not a directory: mount the shared volume there, or set"),
    ],
)
def test_a_wrong_configuration_ends_the_start_with_2_and_one_line(environ: dict[str, str], said: str) -> None:
    ended = launch("run", "--", "true", **environ)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


def test_a_command_that_is_not_there_gives_127_and_one_that_cannot_run_126(tmp_path: Path) -> None:
    missing = launch("run", "--", "no-such-command", CKPT_DIR=str(tmp_path))
    assert (missing.returncode, missing.stderr) == (127, "trainer_hook: no-such-command: command not found\n")
    denied = launch("run", "--", str(tmp_path), CKPT_DIR=str(tmp_path))
    assert (denied.returncode, denied.stderr.count("\n")) == (126, 1)


def test_no_command_is_a_configuration_error(tmp_path: Path) -> None:
    assert launch("run", "--", CKPT_DIR=str(tmp_path)).returncode == 2
    assert launch("rnu").returncode == 2
    assert launch("--help").returncode == 0


def test_the_process_becomes_the_command(tmp_path: Path) -> None:
    ended = launch("run", "--", "sh", "-c", "echo $PYTHONPATH; exit 7", CKPT_DIR=str(tmp_path))
    assert ended.returncode == 7
    assert ended.stdout.split(os.pathsep)[0] == str(INJECT)


def test_the_injected_folder_stands_first_and_only_once() -> None:
    first = environment_for({"PYTHONPATH": f"/a{os.pathsep}/b"})
    assert first["PYTHONPATH"].split(os.pathsep) == [str(INJECT), "/a", "/b"]
    again = environment_for(first)
    assert again["PYTHONPATH"] == first["PYTHONPATH"]
    assert environment_for({})["PYTHONPATH"] == str(INJECT)
    assert environment_for({"HOME": "/h"})["HOME"] == "/h"


def test_torchrun_is_given_the_grace_period_unless_it_has_a_timeout_of_its_own() -> None:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert environment_for({"CKPT_GRACE_SECONDS": "120"})[name] == "120"
    assert environment_for({name: "7"})[name] == "7"


@pytest.mark.parametrize(
    ("grace", "given", "reads_variable", "warned"),
    [
        ("120", None, False, "torch 2.12"),
        ("30", None, False, None),
        ("120", None, True, None),
        ("120", None, None, None),
        ("120", "60", True, "shorter than"),
        ("120", "120", True, None),
        ("120", "soon", True, None),
    ],
)
def test_it_is_said_where_torchrun_kills_the_ranks_before_the_grace_period_is_over(
    grace: str, given: str | None, reads_variable: bool | None, warned: str | None
) -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": given} if given else {}
    said = shutdown_warning(environ, from_environment({"CKPT_GRACE_SECONDS": grace}), reads_variable=reads_variable)
    assert (said is None) == (warned is None)
    assert (warned or "") in (said or "")


def test_the_torch_of_this_machine_has_the_knob() -> None:
    version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    assert torch_reads_variable() is (version >= (2, 12))


@pytest.mark.parametrize(
    ("command", "is_it"),
    [
        (["torchrun", "--nproc_per_node=2", "train.py"], True),
        (["/opt/bin/torchrun", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["accelerate", "launch", "train.py"], True),
        (["python", "train.py", "torchrun"], False),
        (["python", "-m"], False),
    ],
)
def test_torchrun_is_known_by_its_names(command: list[str], is_it: bool) -> None:
    assert _is_torchrun(command) is is_it


@pytest.mark.parametrize(
    ("command", "grace", "is_said"),
    [("/bin/deepspeed train.py", "31", True), ("deepspeed train.py", "30", False), ("torchrun deepspeed.py", "60", False)],
)
def test_a_grace_period_that_deepspeed_does_not_wait_for_is_said(command: str, grace: str, is_said: bool) -> None:
    said = deepspeed_warning(command.split(), from_environment({"CKPT_GRACE_SECONDS": grace}))
    assert (said is not None) == is_said


@pytest.mark.parametrize(
    ("given", "is_said"),
    [
        ({}, False),
        ({"CKPT_SAVE_STEPS": "10"}, False),
        ({"CKPT_SAVE_STEPS": "10", "CKPT_SAVE_MINUTES": " "}, False),
        ({"CKPT_SAVE_STEPS": "10", "CKPT_SAVE_MINUTES": "5"}, True),
        ({"CKPT_SAVE_STEPS": "10", "CKPT_SAVE_MINUTES": "5", "CKPT_SAVE_STRATEGY": "steps"}, False),
    ],
)
def test_of_two_intervals_the_unused_one_is_named(given: dict[str, str], is_said: bool) -> None:
    said = ignored_setting(given)
    assert (said is not None) == is_said
    if said is not None:
        assert said.startswith("CKPT_SAVE_STEPS has no effect")
        assert from_environment(given).save_strategy == "minutes"
