"""The hook in each Python that a trainer may have, beside a sidecar that runs in this one: a run is stopped and continued.

An interpreter is ``python3.10`` and so on in PATH, or pyenv's; one that is missing is skipped.
``CKPT_TEST_PYTHONS=required``: it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import HOOKED, ROOT, Training, finished, marker, plain_environ, trainer_state, training
from tests.hook.train_call.test_plain import SCRIPT

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
NEED_TORCH = {"accelerate", "asynchronous.sharded", "deepspeed", "lightning", "torch", "libraries.weights_sample"}
NEED_TORCH |= {f"libraries.lightning_{name}" for name in ("fit", "state", "validation")}
NEED_TORCH |= {f"loops.{name}" for name in ("loading", "loop", "randomness", "state_files")}
IMPORTS = """
import importlib, pathlib, sys
sys.path.insert(0, ROOT)
missing = {}
for path in sorted(pathlib.Path(ROOT, "trainer_hook").rglob("*.py")):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if path.parent.name != "inject" and path.name != "__main__.py":
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing[name] = error.name
print(missing)
"""


def interpreters(version: str) -> Iterator[Path]:
    """Yield where an interpreter may be: in PATH (pyenv's programs there start only the chosen versions), or below pyenv."""
    yield from map(Path, filter(None, [shutil.which(f"python{version}")]))
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        yield from sorted(Path(root).glob(f"versions/{version}.*/bin/python"))


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter of one version, without packages."""
    for found in interpreters(request.param):
        command = [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if asked.stdout.strip() == request.param:
            return str(found)
    why_not = f"python{request.param} is not installed"
    if os.environ.get("CKPT_TEST_PYTHONS") == "required":
        pytest.fail(why_not)
    pytest.skip(why_not)


def test_every_module_is_imported_by_it(python: str) -> None:
    code = IMPORTS.replace("ROOT", repr(str(ROOT)))
    environ = plain_environ() | {"PYTHONWARNINGS": "error"}
    done = subprocess.run([python, "-s", "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    missing = eval(done.stdout)  # a dictionary of names
    assert set(missing.values()) <= {"torch"}
    assert set(missing) in (set(), {f"trainer_hook.{name}" for name in NEED_TORCH})


def test_a_run_in_it_is_stopped_and_continued(python: str, tmp_path: Path) -> None:
    command, store = [python, *HOOKED, python, "-c", SCRIPT], tmp_path / "store"

    def run(volume: str, found: dict[str, str], step_s: str) -> AbstractContextManager[Training]:
        return training([*command, step_s], tmp_path / volume, found, hooked=False)

    with pod(tmp_path / "first", store) as (sidecar, found), run("first", found, "0.1") as first:
        first.at_step(7)
        assert first.terminate() == 143, first.log()
        last = first.steps()[-1]
        assert finished(first.volume) == ["checkpoint-5", f"checkpoint-{last}"]
        assert trainer_state(first.volume)["state"] == "preempted"
        sidecar.committed(f"checkpoint-{last}")
        assert sidecar.terminate() == 0
    with pod(tmp_path / "second", store) as (_, found), run("second", found, "0") as second:
        assert second.wait() == 0, second.log()
        assert second.steps() == list(range(last + 1, 21))
        assert marker(second.volume, "checkpoint-20")["meta"]["resumed_from"]["step"] == last
        assert "everything is durable" in second.log()
