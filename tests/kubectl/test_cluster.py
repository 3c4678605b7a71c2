"""kubectl as a subprocess: here a program of the tests in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.errors import NothingFound
from sidecar.kubectl import bundle
from sidecar.kubectl.cluster import Kubectl


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program; a test writes what it does."""
    program = tmp_path / "kubectl"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


def does(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_the_end_of_a_long_log_is_taken(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kubectl does it: --limit-bytes would take the beginning."""
    does(kubectl, 'cut=cat; for a in "$@"; do case $a in --limit-bytes=*) cut="head -c ${a#*=}";; esac; done; seq 1000 | $cut')
    monkeypatch.setattr(bundle, "LOG_BYTES", 12)
    assert bundle._log(Kubectl(), "pod", "checkpoint-sidecar", previous=False).splitlines() == ["999", "1000"]
    monkeypatch.setattr(bundle, "LOG_BYTES", 1_000_000)
    assert len(bundle._log(Kubectl(), "pod", "checkpoint-sidecar", previous=True).splitlines()) == 1000


def test_a_log_that_is_not_there_has_the_reason(kubectl: Path) -> None:
    does(kubectl, 'echo "Error from server (NotFound): pods \\"x\\" not found" >&2; exit 1')
    with pytest.raises(NothingFound, match='pods "x" not found'):
        Kubectl().end_of("logs", "x", most_bytes=10)
