"""A pod that begins to use a volume."""

from __future__ import annotations

from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.daemon.settings import Settings
from sidecar.lifecycle.pod import Pod
from sidecar.lifecycle.termination import Termination
from sidecar.volume.volume import Volume


def begin(
    volume: Volume, name: str = "pod", *, grace_s: float = 30.0, is_unique: bool = True, run: VolumeRun | None = None
) -> tuple[Pod, Termination]:
    """Return the pod of that name, and its termination, after it has read what is on the volume."""
    termination = Termination(volume, grace_s=grace_s)
    pod = Pod(Settings.model_construct(pod=name, pod_is_unique=is_unique), volume, termination)
    pod.begin(run)
    return pod, termination
