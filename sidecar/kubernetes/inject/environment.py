"""Environment variables of the trainer and of the sidecar."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from typing import Any

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.fields import growing, metadata_of, named, put_named
from sidecar.kubernetes.inject.identity import ONE_OR_MORE, told
from sidecar.kubernetes.inject.pods import Pod
from sidecar.kubernetes.inject.reports import NotInjectable
from sidecar.kubernetes.inject.workload import RUN_NAMES, VARIABLE, owner_of_pod, run_variables
from trainer_hook.contract import DEFAULT_API_PORT

_BEFORE_ENV = ("name", "image", "imagePullPolicy", "command", "args", "workingDir", "ports", "envFrom")
BEFORE_MOUNTS = (*_BEFORE_ENV, "env", "resources", "restartPolicy")
"""Fields of a container that usually stand in front of its mounts."""


def _shared(pod: Pod) -> dict[str, Any]:
    port = pod.options.api_port
    return {
        "CKPT_DIR": pod.shared.directory,
        "CKPT_GRACE_SECONDS": str(pod.grace_s),
        **({"CKPT_API_PORT": str(port)} if port and port != DEFAULT_API_PORT else {}),
    }


def put_trainer_environment(pod: Pod) -> None:
    """Give the trainer the volume's directory, the grace period and, with the hook, the variables that activate it.

    Raises:
        NotInjectable: ``PYTHONPATH`` cannot be prefixed.
    """
    env = growing(pod.trainer, "env", pod.trainer_path, after=_BEFORE_ENV)
    wanted = _shared(pod) | pod.options.trainer_settings()
    if pod.options.install_hook:
        hook = f"{pod.shared.directory}/{made.HOOK_DIR}"
        there = named(env, "PYTHONPATH")
        if there is not None and "value" not in there and "valueFrom" in there:
            raise NotInjectable(
                f"{pod.trainer_path}.env", "PYTHONPATH comes from elsewhere and cannot be prefixed: write its value"
            )
        paths = str((there or {}).get("value") or "")
        # An empty part is the working directory to Python.
        wanted["PYTHONPATH"] = ":".join(dict.fromkeys([hook, *(paths.split(":") if paths else [])]))
        if named(env, "CKPT_HOOK") is None:  # one that a person wrote stays
            wanted.setdefault("CKPT_HOOK", "auto")
        # torchrun kills its workers this long after SIGTERM. A value that a person chose stays.
        before = [(named(env, name) or {}).get("value") for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "CKPT_GRACE_SECONDS")]
        if before[0] in (None, before[1]):
            wanted["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(pod.grace_s)
    put_environment(env, wanted)


def put_sidecar_environment(pod: Pod, env: MutableSequence[Any], store: str, *, state_dir: str) -> None:
    """Give the sidecar its variables, those that the store refers to in front of it: Kubernetes expands no others."""
    other_mode = "CKPT_MODE" if pod.options.is_native else made.INSTALL_HOOK
    if (left := named(env, other_mode)) is not None:
        env.remove(left)
    wanted = _of_sidecar(pod, store, state_dir)
    if pod.template.kind.name == "Pod" and owner_of_pod(metadata_of(pod.template.document)) and named(env, "CKPT_STORE"):
        wanted = _beside_the_workloads(env, wanted)
    put_variables(env, wanted)


def _beside_the_workloads(env: MutableSequence[Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what the sidecar of an injected workload knows better than one of its pods: its run, and how many nodes."""
    guessed = {name for name in ("PET_NNODES",) if wanted.get(name) == ONE_OR_MORE}
    known = {name for name in RUN_NAMES if named(env, name) is not None}
    return {name: value for name, value in wanted.items() if name not in guessed | known}


def put_variables(env: MutableSequence[Any], wanted: Mapping[str, Any]) -> None:
    """Set variables of the sidecar, the store among them, and keep those that it refers to in front of it."""
    put_environment(env, wanted)
    names = [str(entry.get("name")) for entry in env]
    needed = [names.index(variable[2:-1]) for variable in VARIABLE.findall(wanted["CKPT_STORE"]) if variable[2:-1] in names]
    if (position := names.index("CKPT_STORE")) < max(needed, default=0):
        entry = env[position]
        del env[position]
        env.insert(max(needed), entry)


def put_environment(env: MutableSequence[Any], wanted: Mapping[str, Any]) -> None:
    """Set variables: a value, or its source (``valueFrom``)."""
    for name, value in wanted.items():
        put_named(env, {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value})


def _of_sidecar(pod: Pod, store: str, state_dir: str) -> dict[str, Any]:
    options, template = pod.options, pod.template
    several = told(template, pod.trainer, pod.trainer_path, count=pod.nodes.count)
    is_alone = not several and "CKPT_NODE_COUNT" not in options.settings
    version = options.kubernetes_version
    has_old_labels = version is not None and version < (1, 27)
    wanted = run_variables(template.document, template.kind, store, is_alone=is_alone, has_old_labels=has_old_labels)
    wanted |= {"CKPT_STORE": store} | _shared(pod)
    wanted["CKPT_STATE_DIR"] = state_dir
    if not options.is_native:
        wanted["CKPT_MODE"] = "classic"
    elif options.install_hook:
        wanted[made.INSTALL_HOOK] = f"{pod.shared.directory}/{made.HOOK_DIR}"
    if options.secret:
        wanted["CKPT_CREDENTIALS_DIR"] = made.CREDENTIALS_DIR
    if options.metrics_port:
        wanted["CKPT_METRICS_BIND"] = f"0.0.0.0:{options.metrics_port}"
    wanted |= several
    if pod.nodes.count is not None:
        wanted["CKPT_NODE_COUNT"] = str(pod.nodes.count)
    wanted |= options.sidecar_settings()
    wanted["POD_UID"] = {"fieldRef": {"fieldPath": "metadata.uid"}}
    if pod.nodes.index_field:
        wanted["CKPT_NODE_INDEX"] = {"fieldRef": {"fieldPath": pod.nodes.index_field}}
    return wanted
