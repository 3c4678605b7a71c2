"""The containers that a pod gets; names of their volumes and ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.resources import is_guaranteed, with_given
from trainer_hook.contract import LEASES

SIDECAR = "checkpoint-sidecar"
HOOK = "checkpoint-hook"
DOCTOR = "checkpoint-doctor"
VOLUME = "checkpoints"
VOLUME_BESIDE = "checkpoint-sidecar"
"""The shared volume's name where the first one is taken by something else."""
CREDENTIALS = "checkpoint-credentials"
CREDENTIALS_DIR = "/var/run/secrets/checkpoint-sidecar"
STORE = "checkpoint-store"
STATE = "checkpoint-sidecar-state"
"""The sidecar's private volume, whose content it trusts: the trainer cannot write there."""
STATE_DIRS = ("/state", "/sidecar-state", "/checkpoint-sidecar-state")
"""Its mount paths: the first that is free."""
METRICS = "ckpt-metrics"
HOOK_DIR = ".ckpt/hook"
"""Directory of the hook on the shared volume, for its installation and ``PYTHONPATH``."""
INSTALL_HOOK = "CKPT_INSTALL_HOOK"
"""A native sidecar installs the hook itself: its trainer starts later."""
_UNTIL_TRAINING_ENDS = (
    "import fcntl, glob, os; "
    f"[fcntl.lockf(open(lease), fcntl.LOCK_SH) for lease in glob.glob(os.environ['CKPT_DIR'] + '/{LEASES}/*.lease')]"
)
PRE_STOP_OF_TRAINER = {"exec": {"command": ["python3", "-I", "-c", _UNTIL_TRAINING_ENDS]}}
"""Keeps SIGTERM from ``ray start`` or ``sshd``, with which the training would end, until that has saved and ended."""

COMMAND = ["checkpoint-sidecar", "run"]
_SHARE = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}}
_WHOLE = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}
_ONCE = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
_ONCE_WHOLE = {"requests": {"cpu": "500m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}}


def security(*, as_root: bool, user: int | None, group: int | None) -> dict[str, Any]:
    """Return a security context of the restricted Pod Security Standard; the user is the trainer's, or else the image's."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": not as_root,
        **({} if user is None else {"runAsUser": user}),
        **({} if group is None else {"runAsGroup": group}),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def sidecar(
    *, image: str, native: bool, resources: dict[str, Any], secured: dict[str, Any], metrics_port: int | None
) -> dict[str, Any]:
    """Return the sidecar without its environment and mounts.

    The startup probe says that the API is up, nothing about the store: a native sidecar that has not started holds up the
    trainer, and a pod that is not ready holds up its neighbours. It is often, since the trainer waits for it.
    """
    probe = {"exec": {"command": ["checkpoint-sidecar", "probe"]}, "timeoutSeconds": 5}
    return {
        "name": SIDECAR,
        "image": image,
        "command": list(COMMAND),
        **({"restartPolicy": "Always"} if native else {}),
        "env": [],
        **({"ports": [{"name": METRICS, "containerPort": metrics_port, "protocol": "TCP"}]} if metrics_port else {}),
        "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": 120},
        "readinessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 3},
        "lifecycle": {"preStop": {"exec": {"command": ["checkpoint-sidecar", "drain"]}}},
        "resources": resources,
        "securityContext": secured,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [],
    }


def hook_installer(
    *, image: str, resources: dict[str, Any], secured: dict[str, Any], volume: str, directory: str
) -> dict[str, Any]:
    """Return the init container that copies the hook to the volume, where sidecar and trainer start at the same time."""
    return {
        "name": HOOK,
        "image": image,
        "command": ["checkpoint-sidecar", "install-hook", f"{directory}/{HOOK_DIR}"],
        "resources": resources,
        "securityContext": secured,
        "volumeMounts": [{"name": volume, "mountPath": directory}],
    }


def doctor(*, image: str, resources: dict[str, Any], secured: dict[str, Any]) -> dict[str, Any]:
    """Return the init container that examines store and volume, without its environment and mounts: the sidecar's."""
    return {
        "name": DOCTOR,
        "image": image,
        "command": ["checkpoint-sidecar", "doctor"],
        "env": [],
        "resources": resources,
        "securityContext": secured,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [],
    }


def resources_of(spec: Mapping[str, Any], options: Options, there: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the resources of a pod's sidecar or doctor. ``there``: the container of an earlier injection, which keeps its own.

    Those that the options name replace both.
    """
    guaranteed = _is_guaranteed(spec)
    before = (there or {}).get("resources") or (_WHOLE if guaranteed else _SHARE)
    return with_given(before, options.resources, guaranteed=guaranteed)


def resources_of_installer(spec: Mapping[str, Any], options: Options, there: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the resources of the init container that copies the hook.

    A quota on limits of CPU counts all containers, so it has that limit, too.
    """
    guaranteed = _is_guaranteed(spec)
    before = (there or {}).get("resources") or (_ONCE_WHOLE if guaranteed else _ONCE)
    return before if guaranteed else with_given(before, {"cpu": (None, options.cpu_limit)}, guaranteed=False)


def _is_guaranteed(spec: Mapping[str, Any]) -> bool:
    return is_guaranteed(spec, ours=frozenset((SIDECAR, HOOK, DOCTOR)))
