"""Supported versions of the trainer's Python: 3.10 and newer. An older one gets a clear error."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, plain_environ
from trainer_hook.activation.run_command import INJECT

HOOK = ROOT / "trainer_hook"
FIRST = (HOOK / "__init__.py", INJECT / "sitecustomize.py")
"""What an interpreter reads before it knows that it is too old."""

NEWER: dict[str, set[str]] = {
    "asyncio": {"timeout", "timeout_at", "TaskGroup", "Runner", "Barrier"},
    "builtins": {"ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "ReprEnum", "EnumCheck", "FlagBoundary", "verify", "member", "nonmember"},
    "hashlib": {"file_digest"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod"},
    "operator": {"call"},
    "os": {"process_cpu_count", "unshare", "setns"},
    "sys": {"exception", "monitoring", "activate_stack_trampoline"},
    "typing": {
        *("Self", "Never", "LiteralString", "assert_never", "assert_type", "reveal_type", "Required", "NotRequired", "Unpack"),
        *("TypeVarTuple", "dataclass_transform", "override", "ReadOnly", "TypeIs"),
    },
    "warnings": {"deprecated"},
}
"""Names of the standard library that 3.10 does not have; mypy (``make types``) knows all of them."""
NEWER_MODULES = {"tomllib", "wsgiref.types", "compression"}


def newer_names(tree: ast.AST) -> list[str]:
    """Return what a module uses that Python 3.10 does not have."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                found += [module] if module in NEWER_MODULES else []
                found += [f"{module}.{n.name}" for n in names if n.name in NEWER.get(module, ())]
            case ast.Import(names=names):
                found += [n.name for n in names if n.name in NEWER_MODULES]
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in NEWER.get(module, ()):
                found.append(f"{module}.{name}")
            case ast.Attribute(attr="add_note"):
                found.append("add_note")
            case ast.Name(id=name) if name in NEWER["builtins"]:
                found.append(name)
            case ast.TryStar():
                found.append("except*")
    return found


@pytest.mark.parametrize("path", sorted(HOOK.rglob("*.py")), ids=lambda path: path.relative_to(HOOK).as_posix())
def test_nothing_in_the_hook_needs_more_than_python_3_10(path: Path) -> None:
    assert newer_names(ast.parse(path.read_text(), feature_version=(3, 10))) == []


@pytest.mark.parametrize("code", ["from enum import StrEnum", "import tomllib", "datetime.UTC", "try: f()\nexcept* E: pass"])
def test_what_3_10_does_not_have_is_found(code: str) -> None:
    assert newer_names(ast.parse(code))


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.name)
def test_what_an_older_python_reads_first_it_can_read(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


OLD = "import sys; sys.version_info = (3, 9, 2, 'final', 0); sys.path.insert(0, {root!r}); {then}"
TOLD = f"trainer_hook needs Python 3.10 or newer; this is 3.9 ({sys.executable})"


def old_python(then: str) -> subprocess.CompletedProcess[str]:
    environ, code = plain_environ() | {"CKPT_HOOK": "auto"}, OLD.format(root=str(ROOT), then=then)
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_the_launcher_under_python_3_9_says_what_it_needs() -> None:
    ended = old_python("import runpy; sys.argv = ['-m', 'run', '--', 'true']; runpy.run_module('trainer_hook', alter_sys=True)")
    assert (ended.returncode, ended.stderr) == (2, f"{TOLD}\n")


def test_injected_into_python_3_9_it_says_so_and_the_script_runs() -> None:
    ended = old_python(f"import runpy; runpy.run_path({str(INJECT / 'sitecustomize.py')!r}); print('script')")
    assert (ended.stdout, ended.returncode) == ("script\n", 0)
    assert ended.stderr == f"[checkpoint] WARNING: the hook is off: ImportError: {TOLD}\n"
