"""The locks: what pyproject.toml asks for, in the versions of constraints.txt, with hashes, and nothing about this machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_PIN = re.compile(r"^([a-z0-9-]+)==(\S+)(?: ; ([^\\]+))? \\$")


class Lock:
    """A file that make lock writes."""

    def __init__(self, name: str) -> None:
        self.text = (ROOT / name).read_text()
        self.versions: dict[str, Version] = {}
        self.hashes: dict[str, int] = {}
        for line in self.text.splitlines():
            if pin := _PIN.match(line):
                name = pin[1]
                self.versions[name], self.hashes[name] = Version(pin[2]), 0
            elif line.startswith("    --hash=sha256:"):
                self.hashes[name] += 1
            else:
                assert line.lstrip().startswith("#"), line

    def wants(self, requirement: Requirement) -> str | None:
        """Return what is wrong with the lock, for one requirement."""
        name = canonicalize_name(requirement.name)
        if name not in self.versions:
            return f"{requirement} is missing"
        if not requirement.specifier.contains(self.versions[name], prereleases=True):
            return f"{name} {self.versions[name]} is not {requirement}"
        return None


def pinned(name: str = "constraints.txt") -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def needed(requirements: list[str]) -> Iterator[Requirement]:
    """Yield requirements, and what the installed packages of that name require in turn."""
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        requirement = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        yield requirement
        if requirement.name in seen:
            continue
        seen.add(requirement.name)
        try:
            waiting += [Requirement(text) for text in distribution(requirement.name).requires or ()]
        except PackageNotFoundError:
            continue  # of the tools, which this environment does not have


GROUPS = PROJECT["dependency-groups"]
LOCKS = {
    "requirements-sidecar.lock": PROJECT["project"]["optional-dependencies"]["sidecar"],
    "requirements-build.lock": PROJECT["build-system"]["requires"],
    "requirements-tools.lock": [*GROUPS["tools"], *GROUPS["build"]],
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_the_project_asks_for(name: str) -> None:
    lock = Lock(name)
    assert [wrong for requirement in needed(LOCKS[name]) if (wrong := lock.wants(requirement))] == []


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_the_versions_that_are_tested(name: str) -> None:
    versions, tested = Lock(name).versions, pinned()
    assert {key: value for key, value in versions.items() if tested.get(key, value) != value} == {}
    if name == "requirements-sidecar.lock":
        assert set(versions) <= set(tested)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_hashes_and_names_no_index_and_no_folder(name: str) -> None:
    lock = Lock(name)
    assert lock.hashes
    assert min(lock.hashes.values()) > 0
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted| /", lock.text.replace("\\\n", ""))


def test_the_oldest_versions_that_are_tested_are_those_that_the_extras_name() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = [Requirement(text) for extra in ("transformers", "torch", "accelerate", "lightning") for text in extras[extra]]
    oldest = pinned("constraints-oldest.txt")
    for requirement in named:
        [bound] = requirement.specifier
        assert bound.operator == ">="
        assert oldest[requirement.name].release[:2] == Version(bound.version).release[:2], requirement
        assert pinned()[requirement.name] >= oldest[requirement.name]


def test_the_support_matrix_names_the_versions_that_are_tested() -> None:
    text = (ROOT / "docs/support.md").read_text()
    rows = re.findall(r"^\| (\w+)(?: \(SDK\)|, on the CPU)? \| ([\d.]*) ?\| ([\d.]+) \|", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == {"torch", "transformers", "accelerate", "lightning", "deepspeed", "kubeflow"}
    oldest, newest = pinned("constraints-oldest.txt"), pinned()
    for name, first, last in rows:
        assert Version(last) == newest[name], name
        assert not first or Version(first) == oldest[name], name


def test_the_image_installs_nothing_without_its_hash() -> None:
    text = (ROOT / "Dockerfile.sidecar").read_text().replace("\\\n", "")
    installs = re.findall(r"pip install [^&\n]*", text)
    assert len(installs) == 2
    assert "--require-hashes" in installs[0]
    assert {"-r requirements-build.lock", "-r requirements-sidecar.lock"} <= set(re.findall(r"-r \S+", installs[0]))
    assert "--no-index --no-build-isolation ." in installs[1]
    assert "pip download" not in text


@pytest.mark.parametrize("dockerfile", ["Dockerfile.sidecar", "Dockerfile.trainer", "deploy/compose/ceph/Dockerfile"])
def test_the_base_of_an_image_is_named_by_its_digest(dockerfile: str) -> None:
    text = (ROOT / dockerfile).read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    [base] = re.findall(r"^ARG BASE_IMAGE=(\S+)", text, re.MULTILINE)
    assert re.fullmatch(r"[a-z]+:[\w.-]+@sha256:[0-9a-f]{64}", base)


def test_the_actions_are_named_by_their_commits() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
    used = [line for text in texts.values() for line in re.findall(r"uses: (.+)", text) if not line.startswith("./")]
    assert len(used) > 10
    assert not [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)]


def test_the_image_builds_with_what_the_project_builds_with() -> None:
    assert PROJECT["build-system"]["requires"] == GROUPS["build"]


def test_a_requirement_that_the_lock_lacks_or_contradicts_is_found() -> None:
    lock = Lock("requirements-sidecar.lock")
    assert lock.wants(Requirement("numpy")) == "numpy is missing"
    assert lock.wants(Requirement("aiohttp<1"))
    assert lock.wants(Requirement("ruamel.yaml>=0.18")) is None
