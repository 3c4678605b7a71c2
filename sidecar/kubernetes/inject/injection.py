"""Puts the sidecar into one pod."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableSequence
from pathlib import Path
from typing import Any

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.environment import BEFORE_MOUNTS, put_sidecar_environment, put_trainer_environment
from sidecar.kubernetes.inject.fields import Fields, containers_of, entries, growing, named, overlay, put, put_named, section
from sidecar.kubernetes.inject.options import DEFAULT_IMAGE
from sidecar.kubernetes.inject.pods import GRACE, Pod, our_container
from sidecar.kubernetes.inject.recalled import SKIP_CONTAINERS, remember, store_in
from sidecar.kubernetes.inject.reports import NotInjectable
from sidecar.kubernetes.inject.trainer import warning_of_guess
from sidecar.kubernetes.inject.volumes import put_own_volume, state_directory
from sidecar.kubernetes.inject.workload import check_store, ends_training_at_sigterm

INJECTED = "checkpoint-sidecar/injected"


def put_in(pod: Pod) -> str:
    """Change the pod: the volume, the trainer's environment, the sidecar, the hook's installer. Returns its store."""
    spec, path, options = pod.spec, pod.template.spec_path, pod.options
    store = _store(pod)
    if options.is_native:
        _remove_installer(pod)
    _label(pod)
    is_guess = any(warning_of_guess(pod.template, options))
    remember(pod.template, options, str(pod.trainer.get("name")), is_guess=is_guess)
    put(spec, GRACE, pod.grace_s, before=("initContainers", "containers"))
    if pod.shared.mount is None:
        volumes = growing(spec, "volumes", path, after=("containers",))
        put_named(volumes, {"name": pod.shared.name, "emptyDir": {}})
        mount = {"name": pod.shared.name, "mountPath": pod.shared.directory}
        put_named(growing(pod.trainer, "volumeMounts", pod.trainer_path, after=BEFORE_MOUNTS), mount, key="mountPath")
    put_trainer_environment(pod)
    if ends_training_at_sigterm(pod.template):
        _hold_sigterm_back(pod)
    secured = _security(pod)
    if options.secret:
        put_own_volume(spec, path, {"name": made.CREDENTIALS, "secret": {"secretName": options.secret}})
    if options.claim:
        put_own_volume(spec, path, {"name": made.STORE, "persistentVolumeClaim": {"claimName": options.claim}})
    _sidecar(pod, store, secured)
    if options.doctor:
        _doctor(pod, secured)
    if options.install_hook and not options.is_native:
        _installer(pod, secured)
    return store


def _label(pod: Pod) -> None:
    metadata = section(pod.template.fields, "metadata", pod.template.path, before=("spec",))
    put(section(metadata, "labels", f"{pod.template.path}.metadata"), INJECTED, "true")
    if pod.options.cloud_identity:
        annotations = section(metadata, "annotations", f"{pod.template.path}.metadata")
        names = [str(container.get("name")) for _, container in containers_of(pod.spec, pod.template.spec_path)]
        there = [name for name in str(annotations.get(SKIP_CONTAINERS, "")).split(",") if name]
        skipped = dict.fromkeys([*there, *(name for name in [*names, made.HOOK] if name not in (made.SIDECAR, made.DOCTOR))])
        if pod.options.is_native or not pod.options.install_hook:
            skipped.pop(made.HOOK, None)
        put(annotations, SKIP_CONTAINERS, ",".join(skipped))


def _hold_sigterm_back(pod: Pod) -> None:
    """Give the trainer a preStop hook, unless it has one or does not save just in time."""
    jit = (named(entries(pod.trainer, "env", pod.trainer_path), "CKPT_JIT") or {}).get("value")
    there = (pod.trainer.get("lifecycle") or {}).get("preStop")
    if not there and str(jit).lower() not in ("false", "0"):
        put(section(pod.trainer, "lifecycle", pod.trainer_path), "preStop", _plain(made.PRE_STOP_OF_TRAINER))


def _security(pod: Pod) -> dict[str, Any]:
    """Return a security context with the trainer's user and group, so that both can link and delete each other's files.

    Else the user of an earlier injection.
    """
    own, common = pod.trainer.get("securityContext") or {}, pod.spec.get("securityContext") or {}
    user = own.get("runAsUser") if pod.options.run_as_user is None else pod.options.run_as_user
    if user is None:
        user = ((our_container(pod) or {}).get("securityContext") or {}).get("runAsUser")
    effective = common.get("runAsUser") if user is None else user
    return made.security(as_root=effective == 0, user=user, group=own.get("runAsGroup"))


def _sidecar(pod: Pod, store: str, secured: dict[str, Any]) -> None:
    spec, options = pod.spec, pod.options
    wanted = made.sidecar(
        image=options.image or DEFAULT_IMAGE,
        native=options.is_native,
        resources=made.resources_of(spec, options, our_container(pod)),
        secured=secured,
        metrics_port=options.metrics_port,
    )
    there = _our_container(pod, wanted)
    state_dir = _private_state(pod, there, store)
    put_sidecar_environment(pod, growing(there, "env", made.SIDECAR), store, state_dir=state_dir)
    mounts = growing(there, "volumeMounts", made.SIDECAR)
    put_named(mounts, {"name": pod.shared.name, "mountPath": pod.shared.directory, **_sub_path(pod)}, key="mountPath")
    if options.secret:
        put_named(mounts, {"name": made.CREDENTIALS, "mountPath": made.CREDENTIALS_DIR, "readOnly": True}, key="mountPath")
    if options.claim:
        put_named(mounts, {"name": made.STORE, "mountPath": _first_folder(store)}, key="mountPath")
    elif store.startswith("file://") and not any(_is_below(store.removeprefix("file://"), mount) for mount in mounts):
        raise NotInjectable("", f"--store {store}: no volume is mounted there in the sidecar: name one with --claim")


def _is_below(path: str, mount: Mapping[str, Any]) -> bool:
    return f"{path}/".startswith(f"{str(mount.get('mountPath')).rstrip('/')}/")


def _first_folder(store: str) -> str:
    folder = "/" + store.removeprefix("file:///").split("/")[0]
    if "$" in folder:
        raise NotInjectable("", f"--store {store}: its first folder is where the claim is mounted, and needs a fixed name")
    return folder


def _private_state(pod: Pod, ours: Fields, store: str) -> str:
    """Give the sidecar a volume that the trainer cannot write to, and return its path; one that a person chose stays."""
    mounts = growing(ours, "volumeMounts", made.SIDECAR)
    there = (named(entries(ours, "env", made.SIDECAR), "CKPT_STATE_DIR") or {}).get("value")
    mounted = named(mounts, str(there), key="mountPath") or {}
    if mounted.get("name") not in (None, made.STATE):
        return str(there)
    directory = state_directory(pod.shared.directory, store)
    put_own_volume(pod.spec, pod.template.spec_path, {"name": made.STATE, "emptyDir": {}})
    for mount in [mount for mount in mounts if mount.get("name") == made.STATE and mount.get("mountPath") != directory]:
        mounts.remove(mount)
    put_named(mounts, {"name": made.STATE, "mountPath": directory}, key="mountPath")
    return directory


def _sub_path(pod: Pod) -> dict[str, Any]:
    """Return the sub-path of the trainer's mount: both containers must see the same directory."""
    mount = pod.shared.mount or {}
    return {key: mount[key] for key in ("subPath", "subPathExpr") if key in mount}


def _our_container(pod: Pod, wanted: dict[str, Any]) -> Fields:
    """Return the sidecar's container in the right list: new, or that of an earlier injection with what people added to it."""
    spec, path = pod.spec, pod.template.spec_path
    right, wrong = ("initContainers", "containers") if pod.options.is_native else ("containers", "initContainers")
    there = named(entries(spec, right, path), made.SIDECAR)
    if there is None:
        moved = named(entries(spec, wrong, path), made.SIDECAR)
        there = _plain(wanted) if moved is None else moved
        if moved is not None:
            spec[wrong].remove(moved)
            if not spec[wrong]:
                del spec[wrong]
        where = growing(spec, right, path, before=("containers",))
        # The first init container: its download for the resume overlaps with the others' work.
        where.insert(_first_position(where), there) if pod.options.is_native else where.append(there)
    if "restartPolicy" not in wanted:
        there.pop("restartPolicy", None)
    kept = {"env", "volumeMounts"}
    if pod.options.image is None and there.get("image"):
        kept.add("image")
    overlay(there, _plain({key: value for key, value in wanted.items() if key not in kept}))
    return there


def _first_position(init_containers: MutableSequence[Any]) -> int:
    ours = [container.get("name") in (made.HOOK, made.DOCTOR) for container in init_containers]
    return ([*ours, False]).index(False)


def _installer(pod: Pod, secured: dict[str, Any]) -> None:
    init = growing(pod.spec, "initContainers", pod.template.spec_path, before=("containers",))
    ours = our_container(pod) or {}
    there = named(init, made.HOOK)
    wanted = _plain(
        made.hook_installer(
            image=str(ours.get("image")),
            resources=made.resources_of_installer(pod.spec, pod.options, there),
            secured=secured,
            volume=pod.shared.name,
            directory=pod.shared.directory,
        )
    )
    wanted["volumeMounts"][0].update(_sub_path(pod))
    if there is None:
        init.insert(0, wanted)
    else:
        overlay(there, wanted)


def _remove_installer(pod: Pod) -> None:
    """Remove the init container of an earlier injection: a native sidecar does its work."""
    init = pod.spec.get("initContainers") or []
    if (there := named(init, made.HOOK)) is not None:
        init.remove(there)
        if not init:
            del pod.spec["initContainers"]


def _doctor(pod: Pod, secured: dict[str, Any]) -> None:
    """Put the doctor in front of the sidecar, with the sidecar's environment and mounts: it sees what the sidecar will see."""
    init = growing(pod.spec, "initContainers", pod.template.spec_path, before=("containers",))
    ours = our_container(pod) or {}
    there = named(init, made.DOCTOR)
    wanted = made.doctor(
        image=str(ours.get("image")), resources=made.resources_of(pod.spec, pod.options, there), secured=secured
    )
    wanted |= {key: ours[key] for key in ("env", "envFrom", "volumeMounts") if ours.get(key)}
    wanted["env"] = [entry for entry in wanted["env"] if entry.get("name") != "CKPT_METRICS_BIND"]
    wanted = _plain(wanted)
    if there is None:
        init.insert(_first_position(init[:1]), wanted)
    else:
        overlay(there, wanted)


def _store(pod: Pod) -> str:
    """Return the store option, else the store of an earlier injection, in the form of ``CKPT_STORE``."""
    store = pod.options.store or store_in(pod.spec)
    if store is None:
        raise NotInjectable("", "--store is missing: where do the checkpoints go? Such as s3://bucket/runs/{name}")
    check_store(store, pod.template.document, volume=Path(pod.shared.directory))
    return store


def _plain(value: Any) -> Any:
    """Return a copy without shared parts, which YAML would write as anchors."""
    return json.loads(json.dumps(value))
