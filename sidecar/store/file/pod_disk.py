"""The root file system of a container in a pod: the kubelet deletes it with the container, and a store there with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets it in each container."""


def ends_with_container(folder: Path, *, environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether a folder lies on the container's own file system, not on a volume that is mounted there. Outside pods: false."""
    return bool(environ.get(IN_A_POD)) and folder.stat().st_dev == root.stat().st_dev
