"""The import name ``sidecar`` belongs to a Jupyter widget, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(*paths: Path) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}; import checkpoint_sidecar.kubeflow; print('there')"
    )
    return subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60)


def test_the_facade_says_who_has_taken_the_name(tmp_path: Path) -> None:
    (tmp_path / "sidecar").mkdir()
    (tmp_path / "sidecar/__init__.py").write_text("class Sidecar: ...\n")
    said = imported(tmp_path, ROOT).stderr.splitlines()[-1]
    assert said.startswith("ImportError: the import name 'sidecar' belongs to another distribution here")
    assert "pip uninstall sidecar" in said


def test_it_loads_nothing_of_the_sidecars_own_packages() -> None:
    heavy = "('typer', 'ruamel', 'boto3', 'pydantic')"
    program = f"import sys, checkpoint_sidecar.kubeflow; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
    assert imported(ROOT).stdout.strip() == "there"
