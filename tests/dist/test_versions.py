"""The version is defined in one file, and every place that repeats it agrees."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

import checkpoint_sidecar
import sidecar
import trainer_hook
from tests.dist.conftest import working_copy

ROOT = Path(__file__).parents[2]
PLACEHOLDER = "https://git.example/checkpoint-sidecar"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that name a version, in a folder of their own."""
    for name in working_copy():
        if name.startswith(("deploy/", ".ci/", "docs/", "tests/cluster/README")) or name in (
            *("CHANGELOG.md", "README.md", "pyproject.toml"),
            "trainer_hook/__init__.py",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def version(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([folder / ".ci/version", *arguments], capture_output=True, text=True, timeout=60, check=False)


def places() -> ModuleType:
    loader = SourceFileLoader("version", str(ROOT / ".ci/version"))
    spec = importlib.util.spec_from_loader("version", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_place_names_the_version_of_the_package() -> None:
    checked = version(ROOT, "check")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert version(ROOT).stdout.strip() == trainer_hook.__version__ == sidecar.__version__ == checkpoint_sidecar.__version__


def test_no_manifest_has_an_image_that_the_version_is_not_written_into() -> None:
    known = {(str(file), line) for file, line, _ in places().found()}
    for path in (ROOT / "deploy").rglob("*.yaml"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"checkpoint-sidecar:\d", line):
                assert (str(path.relative_to(ROOT)), number) in known


def test_a_new_version_is_written_everywhere(copy: Path) -> None:
    assert version(copy, "set", "7.8.9rc1").returncode == 0
    assert version(copy).stdout == "7.8.9rc1\n"
    assert version(copy, "check").returncode == 0
    text = (copy / "deploy/kubernetes/job.yaml").read_text()
    assert "checkpoint-sidecar:7.8.9rc1" in text
    assert f"checkpoint-sidecar:{trainer_hook.__version__}" not in text


def test_a_place_that_was_forgotten_is_named(copy: Path) -> None:
    manifest = copy / "deploy/kubernetes/job.yaml"
    manifest.write_text(manifest.read_text().replace(f":{trainer_hook.__version__}", ":0.0.1"))
    checked = version(copy, "check")
    assert checked.returncode == 1
    assert f"deploy/kubernetes/job.yaml:1: 0.0.1 instead of {trainer_hook.__version__}" in checked.stderr


def test_a_release_needs_its_tag_a_dated_changelog_and_a_real_address(copy: Path) -> None:
    refused = version(copy, "release", "v7.8.9")
    assert refused.returncode == 1
    assert [line.partition(" ")[0] for line in refused.stderr.splitlines()] == ["the", "CHANGELOG.md", "[project.urls]"]
    changes, project = copy / "CHANGELOG.md", copy / "pyproject.toml"
    changes.write_text(changes.read_text().replace("## Unreleased", f"## {trainer_hook.__version__} - 2030-01-31", 1))
    project.write_text(project.read_text().replace("git.example", "git.mycompany.com"))
    accepted = version(copy, "release", f"v{trainer_hook.__version__}")
    assert (accepted.returncode, accepted.stderr) == (0, "")


def test_the_address_is_the_same_in_all_places() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert set(urls) >= {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert all(url.startswith(PLACEHOLDER) for url in urls.values())
    assert f'runbook_url: {PLACEHOLDER}/OPERATIONS.md' in (ROOT / "deploy/monitoring/prometheus-rule.yaml").read_text()
