"""What is in the wheel and the sdist."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from docs_site import markdown
from tests.dist.conftest import ROOT, TOOLS, Built, build, done, working_copy

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
PACKAGES = ("checkpoint_sidecar", "sidecar", "trainer_hook")


def tracked() -> set[str]:
    """Return the files of the packages."""
    return set(working_copy(*PACKAGES))


def in_sdist(sdist: Path) -> dict[str, bytes]:
    with tarfile.open(sdist) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        return {member.name.partition("/")[2]: archive.extractfile(member).read() for member in files}  # type: ignore[union-attr]


def in_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_twine_accepts_both(built: Built) -> None:
    checked = done(TOOLS / "twine", "check", "--strict", built.wheel, built.sdist)
    assert checked.count("PASSED") == 2


def test_the_wheel_has_the_packages_and_nothing_else(built: Built) -> None:
    names = set(in_wheel(built.wheel))
    [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    assert {name for name in names if not name.startswith(info)} == tracked()
    assert {f"{package}/py.typed" for package in PACKAGES} | {"sidecar/api/web/index.html"} <= names
    assert f"{info}/licenses/LICENSE" in names


def test_the_sdist_has_what_the_wheel_is_built_from_and_nothing_else(built: Built, tmp_path: Path) -> None:
    names = {name for name in in_sdist(built.sdist) if ".egg-info/" not in name}
    more = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert names == tracked() | more
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    again = build(tmp_path / "dist", source)
    assert again.wheel.read_bytes() == built.wheel.read_bytes(), "the same commit has the same wheel"


def test_neither_names_a_folder_of_this_machine(built: Built) -> None:
    folders = [str(ROOT).encode(), str(built.wheel.parent).encode(), str(Path.home()).encode() + b"/."]
    for files in (in_wheel(built.wheel), in_sdist(built.sdist)):
        assert not [(name, folder) for name, text in files.items() for folder in folders if folder in text]


def test_the_metadata_say_what_a_stranger_needs(built: Built) -> None:
    files = in_wheel(built.wheel)
    [text] = [files[name].decode() for name in files if name.endswith(".dist-info/METADATA")]
    found = Parser().parsestr(text)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found.get_all("Provides-Extra") is not None
    assert {"inject", "kubectl", "kubeflow", "demo", "sidecar"} <= set(found.get_all("Provides-Extra", []))
    assert {url.partition(",")[0] for url in found.get_all("Project-URL", [])} >= {"Source", "Changelog", "Issues"}
    assert not [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line], "the hook needs nothing"
    links = markdown.links(str(found.get_payload()))
    assert len(links) > 20
    assert not [link for link in links if not link.startswith(("https://", "http://"))], "dead on a package index"
    versions = [c for c in found.get_all("Classifier", []) if re.search(r":: 3\.\d+$", c)]
    assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)]


def test_the_sbom_names_every_locked_package_with_its_licence(index: None, tmp_path: Path) -> None:
    made = subprocess.run(["make", "sbom", "DIST=" + str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stdout + made.stderr
    [sbom] = tmp_path.glob("*.cdx.json")
    table = (tmp_path / "licences.md").read_text()
    application = json.loads(sbom.read_text())["metadata"]["component"]
    assert (application["name"], application["version"]) == ("checkpoint-sidecar", done(ROOT / ".ci/version").strip())
    for name in re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements-sidecar.lock").read_text(), re.MULTILINE):
        pattern = name.replace("-", "[-_.]")
        assert re.search(rf'"purl": "pkg:pypi/{pattern}@', sbom.read_text(), re.IGNORECASE), name
        assert re.search(rf"^\| {pattern} \| \S+ \| \S", table, re.MULTILINE | re.IGNORECASE), name
    assert not re.search(r"\bA?GPL", table.replace("LGPL", "")), "what an image may not carry"
