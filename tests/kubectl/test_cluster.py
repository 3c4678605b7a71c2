"""kubectl as a subprocess: here a program of the tests in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.core.job.workloads import kind_called
from sidecar.errors import NothingFound
from sidecar.kubectl import bundle
from sidecar.kubectl.cluster import Kubectl
from sidecar.kubectl.job import AT_ONCE, Job
from sidecar.kubectl.saving import save


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


def test_a_save_asks_all_pods_at_the_same_time_however_many_there_are(kubectl: Path, tmp_path: Path) -> None:
    """Each answers when all have been asked, as a save of several nodes is durable when all have done their part."""
    count = AT_ONCE + 2
    answer = '{"state": "durable", "checkpoint": "checkpoint-8"}'
    wait = f"i=0; while [ $i -lt 200 ]; do set -- {tmp_path}/asked-*; [ $# -ge {count} ] && break; i=$((i+1)); sleep 0.1; done"
    does(kubectl, f"touch {tmp_path}/asked-$2; {wait}; [ $# -ge {count} ] && echo '{answer}'")
    containers = [{"name": "checkpoint-sidecar"}]
    status = {"phase": "Running", "initContainerStatuses": [{"name": "checkpoint-sidecar", "state": {"running": {}}}]}
    pods = tuple(
        {"metadata": {"name": f"run-{index}"}, "spec": {"initContainers": containers}, "status": status}
        for index in range(count)
    )
    kind = kind_called("job")
    assert kind is not None
    assert save(Kubectl(), Job(kind, "run", {}, pods), timeout_s=10).is_durable
