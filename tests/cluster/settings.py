"""What the suite is told about the cluster, all by environment variables (tests/cluster/README.md)."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass, field


def _setting(name: str, default: str = "") -> str:
    return os.environ.get(f"CKPT_CLUSTER_{name}", default)


@dataclass(frozen=True)
class ClusterSettings:
    """The same for all tests of a run."""

    image: str = field(default_factory=lambda: _setting("IMAGE", "docker.io/library/checkpoint-sidecar:test"))
    trainer_image: str = field(default_factory=lambda: _setting("TRAINER_IMAGE"))
    """Any image with Python 3.10 or newer; empty: the sidecar's."""
    torch_image: str = field(default_factory=lambda: _setting("TORCH_IMAGE"))
    torch_packages: str = field(default_factory=lambda: _setting("TORCH_PACKAGES"))
    """A folder of the nodes with PyTorch for the trainer image's Python, instead of an image that has it."""
    user: int | None = field(
        default_factory=lambda: int(_setting("USER", "10001")) if _setting("USER", "10001") != "any" else None
    )
    """``runAsUser`` and ``fsGroup``; ``None``: the cluster gives one (OpenShift)."""
    endpoint: str = field(default_factory=lambda: _setting("S3_ENDPOINT"))
    """The S3 server, as pods and the tests reach it."""
    bucket: str = field(default_factory=lambda: _setting("S3_BUCKET", "cluster-tests"))
    access_key: str = field(default_factory=lambda: _setting("S3_ACCESS_KEY", "minioadmin"))
    secret_key: str = field(default_factory=lambda: _setting("S3_SECRET_KEY", "minioadmin"))
    region: str = field(default_factory=lambda: _setting("S3_REGION", "us-east-1"))
    storage_class: str = field(default_factory=lambda: _setting("STORAGE_CLASS"))
    """For a volume that two pods mount."""
    shared_path: str = field(default_factory=lambda: _setting("SHARED_PATH"))
    """A folder that all nodes share and everybody may write to, instead of a storage class."""
    lose_node: str = field(default_factory=lambda: _setting("LOSE_NODE"))
    """A command that cuts the node off whose name is its last argument."""
    restore_node: str = field(default_factory=lambda: _setting("RESTORE_NODE"))

    @property
    def store_variables(self) -> dict[str, str]:
        """Return the keys of a Secret for the store."""
        found = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_S3_BUCKET": self.bucket,
        }
        return found | ({"AWS_S3_ENDPOINT": self.endpoint} if self.endpoint else {})


def call_for_node(command: str, node: str) -> None:
    subprocess.run([*shlex.split(command), node], check=True, timeout=60, capture_output=True)


def why_not() -> str | None:
    """Return why the suite cannot run here."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG is not set: see tests/cluster/README.md"
    if not _setting("S3_ENDPOINT"):
        return "CKPT_CLUSTER_S3_ENDPOINT is not set: see tests/cluster/README.md"
    try:
        done = subprocess.run(["kubectl", "get", "--raw", "/readyz"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"kubectl: {error}"
    return f"the cluster does not answer: {done.stderr.strip()}" if done.returncode else None


def is_required() -> bool:
    return os.environ.get("CKPT_TEST_CLUSTER") == "required"
