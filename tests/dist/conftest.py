"""The distribution as a user gets it: built once, then installed into environments of its own.

Needs the package index that pip uses: without one these tests are skipped, or fail with CKPT_TEST_DIST=required.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".tools/bin"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str | Path, timeout_s: float = 900, **more: object) -> subprocess.CompletedProcess[str]:
    kind = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "errors": "replace"} | more
    return subprocess.run([str(part) for part in command], timeout=timeout_s, check=False, **kind)  # type: ignore[call-overload, no-any-return]


def done(*command: str | Path, **more: object) -> str:
    """Return what a command printed; it must succeed."""
    ended = run(*command, **more)  # type: ignore[arg-type]
    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
    return str(ended.stdout)


def working_copy(*places: str) -> list[str]:
    """Return the files of this working copy that git does not ignore, also where root reads another user's copy."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", *places]
    return [name for name in done(*command, cwd=ROOT).split() if (ROOT / name).is_file()]


@dataclass(frozen=True)
class Built:
    """What make dist makes."""

    wheel: Path
    sdist: Path


def build(folder: Path, source: Path = ROOT) -> Built:
    environ = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}
    done(TOOLS / "python", "-m", "build", "--no-isolation", "--outdir", folder, source, env=environ)
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A package index, and the tools of a release from it."""
    asked = run(*PIP, "download", "--no-cache-dir", "--no-deps", "--dest", tmp_path_factory.mktemp("index"), "six", timeout_s=120)
    why_not = "" if asked.returncode == 0 else f"no package index answers: {asked.stderr.strip().rpartition(chr(10))[2]}"
    if not why_not:
        with (ROOT / "pyproject.toml").open() as lock:  # not by two processes of the tests at once
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = run("make", "-C", ROOT, ".tools/.installed", f"PYTHON={sys.executable}")
        assert made.returncode == 0, made.stderr
        return
    if os.environ.get("CKPT_TEST_DIST") == "required":
        pytest.fail(why_not)
    pytest.skip(why_not)


@pytest.fixture(scope="session")
def built(index: None, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The wheel and the sdist of this working copy."""
    source = tmp_path_factory.mktemp("source")  # setuptools leaves its folders where it builds
    for name in working_copy():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    return build(tmp_path_factory.mktemp("dist"), source)
