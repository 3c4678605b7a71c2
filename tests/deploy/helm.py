"""Helm, as a person calls it: a chart checked, rendered, packed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.schemas import documents

CHART = Path(__file__).parents[2] / "deploy/helm/checkpoint-sidecar"
_BUILT = Path(os.environ.get("CKPT_CLUSTER_CACHE") or Path.home() / ".cache/cluster") / "bin/helm"


def program() -> str:
    """Return where helm is; without one the test is skipped, or fails with ``CKPT_TEST_HELM=required``."""
    found = shutil.which("helm") or (str(_BUILT) if _BUILT.exists() else None)
    if found is None:
        why_not = "helm is not installed: '.ci/kubectl ~/bin/helm' or 'tests/cluster/build helm' brings one"
        pytest.fail(why_not) if os.environ.get("CKPT_TEST_HELM") == "required" else pytest.skip(why_not)
    return found


def helm(*arguments: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program(), *map(str, arguments)]
    return subprocess.run(command, input=given or "", capture_output=True, text=True, timeout=120, check=False)


def rendered(
    values: dict[str, Any],
    *options: str,
    release: str = "run",
    namespace: str = "checkpoint-sidecar",
    kubernetes: str = "1.34.0",
) -> list[dict[str, Any]]:
    """Return the documents that the chart makes of some values.

    Raises:
        ValueError: Helm refuses them; the text is what it said.
    """
    # A helm that was not built by its own makefile takes the oldest Kubernetes it knows.
    where = ["--namespace", namespace, "--kube-version", kubernetes]
    done = helm("template", release, CHART, *where, "--values", "-", *options, given=json.dumps(values))
    if done.returncode:
        raise ValueError(done.stderr)
    return documents(done.stdout)
