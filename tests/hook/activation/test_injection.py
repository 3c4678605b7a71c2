"""The hook in every Python process of a pod: cheap, silent, and never the cause of a failed start."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ
from trainer_hook.activation.run_command import INJECT

IMPORTED = """
import sys
sys.path.insert(0, {root!r})
before = set(sys.modules)
{statement}
names = {{name.split(".")[0] for name in sys.modules}} - {{"trainer_hook"}}
print(sorted(name for name in names if name not in sys.stdlib_module_names and name != "__main__"))
"""
BASE = "import trainer_hook.activation.boot, trainer_hook.contract, trainer_hook.activation.run_command, trainer_hook.__main__"
PARTS = (
    "process.session",
    "saving.step_saver",
    "resuming.resumer",
    "libraries.transformers.trainer",
    "libraries.patched_saves",
)
ALL = ", ".join((BASE, *(f"trainer_hook.{part}" for part in PARTS)))


def python(
    code: str, *options: str, path: tuple[Path | str, ...] = (INJECT,), **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter with the hook injected."""
    environment = plain_environ() | {"CKPT_HOOK": "auto", "PYTHONPATH": os.pathsep.join(map(str, path))} | environ
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("statement", [BASE, ALL])
def test_importing_pulls_in_nothing_beyond_the_standard_library(statement: str) -> None:
    ended = python(IMPORTED.format(root=str(ROOT), statement=statement), "-S", "-I")
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def median_s(*command: str, **environ: str) -> float:
    """Return how much CPU an interpreter takes from start to end."""
    took = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], env=plain_environ() | environ, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(took)


def test_the_base_import_is_quick() -> None:
    bare_s = median_s("-S", "-I", "-c", "pass")
    base_s = median_s("-S", "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {BASE}")
    print(f"bare interpreter {1000 * bare_s:.1f} ms, with the base import {1000 * base_s:.1f} ms")
    assert base_s - bare_s < 0.2


def test_an_interpreter_that_trains_nothing_pays_little() -> None:
    bare_s = median_s("-c", "pass")
    unused_s = median_s("-c", "pass", PYTHONPATH=str(INJECT))
    active_s = median_s("-c", "pass", PYTHONPATH=str(INJECT), CKPT_HOOK="auto")
    print(f"bare {1000 * bare_s:.1f} ms, injected but off {1000 * unused_s:.1f} ms, on {1000 * active_s:.1f} ms")
    assert unused_s - bare_s < 0.1
    assert active_s - bare_s < 0.2


def test_without_the_switch_nothing_is_watched() -> None:
    ended = python("import sys; print(any('trainer_hook' in name for name in sys.modules))", CKPT_HOOK="")
    assert (ended.stdout, ended.stderr) == ("False\n", "")


def test_the_search_path_is_left_as_it_was() -> None:
    code = "import sys; print(sys.path)"
    with_hook, without = python(code), python(code, CKPT_HOOK="")
    assert with_hook.stdout == without.stdout
    twice = (INJECT, ROOT, "/somewhere")
    assert python(code, path=twice).stdout == python(code, path=twice, CKPT_HOOK="").stdout


def test_the_next_sitecustomize_on_the_path_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs', __file__)\n")
    for switch in ("auto", ""):
        ended = python("print('script')", path=(INJECT, tmp_path), CKPT_HOOK=switch)
        assert ended.stdout == f"theirs {tmp_path / 'sitecustomize.py'}\nscript\n"
        assert ended.stderr == ""


def test_injected_twice_it_runs_once(tmp_path: Path) -> None:
    copied = shutil.copytree(INJECT.parents[1], tmp_path / "trainer_hook", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; print(sum(type(finder).__name__ == '_Finder' for finder in sys.meta_path))"
    assert python(code, path=(INJECT, INJECT, f"{INJECT}/")).stdout == "1\n"
    ended = python(code, path=(copied / "activation/inject", INJECT))
    assert (ended.stdout, ended.stderr) == ("1\n", "")


def test_an_error_inside_is_one_warning_line_and_the_interpreter_lives(tmp_path: Path) -> None:
    broken = tmp_path / "trainer_hook/activation"
    (broken / "inject").mkdir(parents=True)
    (broken / "inject/sitecustomize.py").write_text((INJECT / "sitecustomize.py").read_text())
    (broken.parent / "__init__.py").touch()
    (broken / "__init__.py").touch()
    (broken / "boot.py").write_text("raise RuntimeError('broken on purpose')\n")
    ended = python("print('script')", path=(broken / "inject",))
    assert ended.stdout == "script\n"
    assert ended.stderr == "[checkpoint] WARNING: the hook is off: RuntimeError: broken on purpose\n"


def fake_transformers(folder: Path) -> Path:
    """Make a package that looks enough like transformers to be hooked."""
    package = folder / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    trainer = "class Trainer:\n    def train(self, resume_from_checkpoint=None, trial=None):\n        return 'trained'\n"
    (package / "trainer.py").write_text(trainer)
    return folder


USES_IT = "from transformers.trainer import Trainer; print(hasattr(Trainer.train, '__wrapped__'))"


def test_the_library_is_hooked_when_it_is_imported(tmp_path: Path) -> None:
    ended = python(USES_IT, path=(INJECT, fake_transformers(tmp_path)), CKPT_DIR=str(tmp_path))
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_volume_that_fails_at_the_start_leaves_the_hook_on(tmp_path: Path) -> None:
    """Where one rank trained without the hook, the others waited for it for half an hour: training stood still."""
    (tmp_path / ".ckpt").write_text("no directory now")
    ended = python(USES_IT, path=(INJECT, fake_transformers(tmp_path)), CKPT_DIR=str(tmp_path))
    assert ended.stdout == "True\n"
    assert "cannot be written to now" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"CKPT_SAVE_STEPS": "many"}, "SettingError: CKPT_SAVE_STEPS='many' must be a whole number from 1 on"),
        ({"CKPT_SAVE_STEP": "5"}, "SettingError: CKPT_SAVE_STEP is not a setting: did you mean CKPT_SAVE_STEPS?"),
        ({"CKPT_DIR": "/proc/nowhere"}, "No such file or directory"),
    ],
)
def test_a_broken_setting_when_injected_is_one_line_and_the_script_runs(
    environ: dict[str, str], said: str, tmp_path: Path
) -> None:
    code = USES_IT + "; print(Trainer().train())"
    ended = python(code, path=(INJECT, fake_transformers(tmp_path)), **({"CKPT_DIR": str(tmp_path)} | environ))
    assert ended.stdout == "False\ntrained\n"
    assert ended.stderr.startswith("[checkpoint] WARNING: the hook is off: ")
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_the_library_may_be_imported_in_a_thread(tmp_path: Path) -> None:
    code = f"import threading; t = threading.Thread(target=exec, args=({USES_IT!r},)); t.start(); t.join()"
    ended = python(code, path=(INJECT, fake_transformers(tmp_path)), CKPT_DIR=str(tmp_path))
    assert (ended.stdout, ended.stderr) == ("True\n", "")
