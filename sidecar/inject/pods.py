"""Puts the sidecar into one pod."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.inject import containers as made
from sidecar.inject.fields import Fields, entries, growing, named, overlay, put, put_named, section
from sidecar.inject.identity import told
from sidecar.inject.options import ANY_BUCKET, DEFAULT_IMAGE, Options
from sidecar.inject.places import Kind, NotInjectable, Place
from sidecar.store_url import shown, store_place
from trainer_hook.contract import DEFAULT_API_PORT, DEFAULT_DIR

INJECTED = "checkpoint-sidecar/injected"
SKIP_CONTAINERS = "eks.amazonaws.com/skip-containers"
_GRACE = "terminationGracePeriodSeconds"
_KUBERNETES_GRACE_S = 30
_BEFORE_ENV = ("name", "image", "imagePullPolicy", "command", "args", "workingDir", "ports", "envFrom")
_BEFORE_MOUNTS = (*_BEFORE_ENV, "env", "resources", "restartPolicy")
_JOB_LABELS = {
    ("batch", "Job"): "batch.kubernetes.io/job-name",
    ("kubeflow.org", "PyTorchJob"): "training.kubeflow.org/job-name",
}
"""Labels by which a pod knows its job, by kind."""
_HOLDS_FILES = ("emptyDir", "persistentVolumeClaim", "ephemeral", "hostPath", "csi", "nfs")


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared volume of one pod."""

    name: str
    directory: str
    mount: Fields | None
    """The trainer's, where it has one already."""
    volume: Fields | None
    """``None``: to be made, or a claim that the workload makes."""

    @property
    def is_claim_template(self) -> bool:
        """Whether the workload makes a claim for it."""
        return self.mount is not None and self.volume is None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, what is asked for, and what was found in it. Paths are within the document."""

    place: Place
    spec: Fields
    trainer: Fields
    trainer_path: str
    shared: Shared
    grace_s: int
    options: Options
    node_count: int | None
    node_index_field: str | None


def has_trainer(place: Place, options: Options) -> bool:
    """Whether the pod has the container that is said to train; any will do where nothing says which."""
    wanted = options.trainer_container or place.kind.trainer
    spec = section(place.template, "spec", place.path)
    return wanted is None or named(entries(spec, "containers", place.spec_path), wanted) is not None


def look_at(place: Place, options: Options, *, pods: int | None, node_index_field: str | None = None) -> Pod:
    """Return what is needed to put the sidecar into a pod that has a trainer.

    Args:
        place: The pod template.
        options: What is asked for.
        pods: How many pods make one run, where the document says so.
        node_index_field: Field of the pod that holds its index among them.

    Raises:
        NotInjectable: The pod has something that is not understood, or that the sidecar cannot live with.
    """
    spec = section(place.template, "spec", place.path)
    path = place.spec_path
    if (spec.get("os") or {}).get("name") == "windows":
        raise NotInjectable(f"{path}.os.name", "the sidecar needs Linux")
    index = _trainer_index(place, entries(spec, "containers", path), options)
    trainer = spec["containers"][index]
    trainer_path = f"{path}.containers[{index}]"
    _check_ours(spec, path)
    grace_s = options.grace or spec.get(_GRACE)
    if grace_s is not None and (not isinstance(grace_s, int) or grace_s < 1):
        raise NotInjectable(f"{path}.{_GRACE}", f"{grace_s!r} leaves no time to save: give it seconds with --grace")
    shared = _shared_volume(place, spec, trainer, trainer_path, options)
    grace_s = grace_s or _KUBERNETES_GRACE_S
    return Pod(place, spec, trainer, trainer_path, shared, grace_s, options, pods, node_index_field)


def _trainer_index(place: Place, containers: Any, options: Options) -> int:
    path = f"{place.spec_path}.containers"
    names = [str(container.get("name")) for container in containers]
    others = [index for index, name in enumerate(names) if name != made.SIDECAR]
    if not others:
        raise NotInjectable(path, "no container that could train")
    wanted = options.trainer_container or place.kind.trainer
    if wanted is not None:
        return names.index(wanted)
    if len(others) > 1 and place.kind.group != "ray.io":  # Ray's own container is the first
        raise NotInjectable(path, f"which one trains, {', '.join(names[i] for i in others)}? Say it with --trainer-container")
    return others[0]


def _check_ours(spec: Fields, path: str) -> None:
    for key in ("initContainers", "containers"):
        for index, container in enumerate(entries(spec, key, path)):
            if container.get("name") == made.SIDECAR and (container.get("command") or made.COMMAND)[-1] != "run":
                raise NotInjectable(f"{path}.{key}[{index}]", f"is called {made.SIDECAR} and is something else: rename it")


def _shared_volume(place: Place, spec: Fields, trainer: Fields, trainer_path: str, options: Options) -> Shared:
    env = named(entries(trainer, "env", trainer_path), "CKPT_DIR") or {}
    directory = (options.dir or str(env.get("value") or DEFAULT_DIR)).rstrip("/")
    volumes = entries(spec, "volumes", place.spec_path)
    for index, mount in enumerate(entries(trainer, "volumeMounts", trainer_path)):
        if str(mount.get("mountPath", "")).rstrip("/") != directory:
            continue
        where = f"{trainer_path}.volumeMounts[{index}]"
        if mount.get("readOnly"):
            raise NotInjectable(f"{where}.readOnly", f"nothing can be saved in {directory}")
        volume = named(volumes, str(mount.get("name")))
        if volume is None and not _is_claim_template(place, str(mount.get("name"))):
            raise NotInjectable(f"{where}.name", f"there is no volume {mount.get('name')!r}")
        if volume is not None and not any(kind in volume for kind in _HOLDS_FILES):
            raise NotInjectable(
                f"{place.spec_path}.volumes", f"{mount['name']!r} cannot hold checkpoints: mount another at {directory}"
            )
        return Shared(str(mount["name"]), directory, mount, volume)
    for name in (made.VOLUME, made.VOLUME_BESIDE):
        if named(volumes, name) is None and not _is_claim_template(place, name):
            return Shared(name, directory, None, None)
    raise NotInjectable(f"{place.spec_path}.volumes", f"{made.VOLUME} and {made.VOLUME_BESIDE} are both taken: rename one")


def _is_claim_template(place: Place, name: str) -> bool:
    """Whether the workload makes a claim of that name for its pods: a StatefulSet, or a JobSet with volumeClaimPolicies."""
    templates: list[Any] = []
    for above in place.above:
        templates += above.get("volumeClaimTemplates") or []
        for policy in above.get("volumeClaimPolicies") or []:
            templates += policy.get("templates") or []
    return any((template.get("metadata") or {}).get("name") == name for template in templates)


def put_in(pod: Pod) -> str:
    """Change the pod: the volume, the trainer's environment, the sidecar, the hook's installer. Returns its store."""
    spec, path, options = pod.spec, pod.place.spec_path, pod.options
    store = _store(pod)
    _label(pod)
    put(spec, _GRACE, pod.grace_s, before=("initContainers", "containers"))
    if pod.shared.mount is None:
        volumes = growing(spec, "volumes", path, after=("containers",))
        put_named(volumes, {"name": pod.shared.name, "emptyDir": {}})
        mount = {"name": pod.shared.name, "mountPath": pod.shared.directory}
        put_named(growing(pod.trainer, "volumeMounts", pod.trainer_path, after=_BEFORE_MOUNTS), mount, key="mountPath")
    _trainer_environment(pod)
    secured = _security(pod)
    if options.secret:
        _own_volume(pod, {"name": made.CREDENTIALS, "secret": {"secretName": options.secret}})
    if options.claim:
        _own_volume(pod, {"name": made.STORE, "persistentVolumeClaim": {"claimName": options.claim}})
    _sidecar(pod, store, secured)
    if options.install_hook:
        _installer(pod, secured)
    return store


def _own_volume(pod: Pod, volume: dict[str, Any]) -> None:
    """Add a volume for the sidecar alone, or change the one of an earlier injection."""
    spec, path = pod.spec, pod.place.spec_path
    for key in ("initContainers", "containers"):
        for index, container in enumerate(entries(spec, key, path)):
            mounts = entries(container, "volumeMounts", f"{path}.{key}[{index}]")
            if container.get("name") != made.SIDECAR and named(mounts, volume["name"]) is not None:
                raise NotInjectable(
                    f"{path}.{key}[{index}].volumeMounts", f"{volume['name']} is the sidecar's volume: rename yours"
                )
    put_named(growing(spec, "volumes", path, after=("containers",)), volume)


def _label(pod: Pod) -> None:
    template = pod.place.template
    metadata = section(template, "metadata", pod.place.path, before=("spec",))
    put(section(metadata, "labels", f"{pod.place.path}.metadata"), INJECTED, "true")
    if pod.options.cloud_identity:
        annotations = section(metadata, "annotations", f"{pod.place.path}.metadata")
        names = [str(c.get("name")) for key in ("initContainers", "containers") for c in pod.spec.get(key) or ()]
        there = [name for name in str(annotations.get(SKIP_CONTAINERS, "")).split(",") if name]
        skipped = dict.fromkeys([*there, *(name for name in [*names, made.HOOK] if name != made.SIDECAR)])
        if not pod.options.install_hook and made.HOOK not in names:
            skipped.pop(made.HOOK, None)
        put(annotations, SKIP_CONTAINERS, ",".join(skipped))


def _shared_environment(pod: Pod) -> dict[str, Any]:
    port = pod.options.api_port
    return {
        "CKPT_DIR": pod.shared.directory,
        "CKPT_GRACE_SECONDS": str(pod.grace_s),
        **({"CKPT_API_PORT": str(port)} if port and port != DEFAULT_API_PORT else {}),
    }


def _trainer_environment(pod: Pod) -> None:
    env = growing(pod.trainer, "env", pod.trainer_path, after=_BEFORE_ENV)
    wanted = _shared_environment(pod) | pod.options.trainer_settings()
    if pod.options.install_hook:
        hook = f"{pod.shared.directory}/{made.HOOK_DIR}"
        there = named(env, "PYTHONPATH")
        if there is not None and "value" not in there and "valueFrom" in there:
            raise NotInjectable(
                f"{pod.trainer_path}.env", "PYTHONPATH comes from elsewhere and cannot be prefixed: write its value"
            )
        paths = str((there or {}).get("value") or "").split(":")
        wanted["PYTHONPATH"] = ":".join(dict.fromkeys([hook, *filter(None, paths)]))
        wanted["CKPT_HOOK"] = "auto"
        # torchrun kills its workers this long after SIGTERM. A value of its own that a person gave it stays.
        before = [(named(env, name) or {}).get("value") for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "CKPT_GRACE_SECONDS")]
        if before[0] in (None, before[1]):
            wanted["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(pod.grace_s)
    _put_environment(env, wanted)


def _put_environment(env: MutableSequence[Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        put_named(env, {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value})


def _security(pod: Pod) -> dict[str, Any]:
    """The trainer's user and group where they are known: one user can link and delete what the other wrote."""
    own, common = pod.trainer.get("securityContext") or {}, pod.spec.get("securityContext") or {}
    user = own.get("runAsUser") if pod.options.run_as_user is None else pod.options.run_as_user
    effective = common.get("runAsUser") if user is None else user
    return made.security(as_root=effective == 0, user=user, group=own.get("runAsGroup"))


def _whose_run(kind: Kind) -> dict[str, Any]:
    """Return what names the job that a pod belongs to: the sidecar refuses a store that another one writes to.

    Not for a CronJob, whose runs are jobs of different names that may continue each other.
    """
    label = "jobset.sigs.k8s.io/jobset-name" if kind.has_replicated_jobs else _JOB_LABELS.get((kind.group, kind.name))
    if label is None:
        return {}
    name = "JOBSET_NAME" if kind.has_replicated_jobs else "JOB_NAME"
    return {
        "POD_NAMESPACE": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        name: {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}},
    }


def _sidecar_environment(pod: Pod, store: str) -> dict[str, Any]:
    options = pod.options
    wanted = {"CKPT_STORE": store} | _shared_environment(pod)
    if not options.is_native:
        wanted["CKPT_MODE"] = "classic"
    if options.secret:
        wanted["CKPT_CREDENTIALS_DIR"] = made.CREDENTIALS_DIR
    if options.metrics_port:
        wanted["CKPT_METRICS_BIND"] = f"0.0.0.0:{options.metrics_port}"
    wanted |= told(pod.place, pod.trainer, pod.trainer_path, count=pod.node_count)
    if pod.node_count is not None:
        wanted["CKPT_NODE_COUNT"] = str(pod.node_count)
    wanted |= options.sidecar_settings()
    wanted["POD_UID"] = {"fieldRef": {"fieldPath": "metadata.uid"}}
    if pod.node_index_field:
        wanted["CKPT_NODE_INDEX"] = {"fieldRef": {"fieldPath": pod.node_index_field}}
    wanted |= _whose_run(pod.place.kind)
    if pod.place.kind.has_replicated_jobs:
        # Grows with each restart of this very set, so it tells a late pod of the last one from those of this one.
        uid = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
        wanted["JOBSET_UID"] = {"fieldRef": {"fieldPath": uid}}
        attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
        wanted["JOBSET_RESTART_ATTEMPT"] = {"fieldRef": {"fieldPath": attempt}}
    return wanted


def _sidecar(pod: Pod, store: str, secured: dict[str, Any]) -> None:
    spec, options = pod.spec, pod.options
    wanted = made.sidecar(
        image=options.image or DEFAULT_IMAGE,
        native=options.is_native,
        guaranteed=made.is_guaranteed(spec),
        secured=secured,
        metrics_port=options.metrics_port,
    )
    there = _our_container(pod, wanted)
    env = growing(there, "env", made.SIDECAR)
    if options.is_native and (mode := named(env, "CKPT_MODE")) is not None:
        env.remove(mode)
    _put_environment(env, _sidecar_environment(pod, store))
    mounts = growing(there, "volumeMounts", made.SIDECAR)
    put_named(mounts, {"name": pod.shared.name, "mountPath": pod.shared.directory, **_sub_path(pod)}, key="mountPath")
    if options.secret:
        put_named(mounts, {"name": made.CREDENTIALS, "mountPath": made.CREDENTIALS_DIR, "readOnly": True}, key="mountPath")
    if options.claim:
        put_named(
            mounts, {"name": made.STORE, "mountPath": "/" + store.removeprefix("file:///").split("/")[0]}, key="mountPath"
        )


def _sub_path(pod: Pod) -> dict[str, Any]:
    """Both containers must see the same directory, also where that is one which links do not work in."""
    mount = pod.shared.mount or {}
    return {key: mount[key] for key in ("subPath", "subPathExpr") if key in mount}


def _our_container(pod: Pod, wanted: dict[str, Any]) -> Fields:
    """Return the sidecar's container in the right list: new, or that of an earlier injection with what people added to it."""
    spec, path = pod.spec, pod.place.spec_path
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
        # The first of the init containers: what it downloads for the resume is on its way while the others work.
        where.insert(_first_place(where), there) if pod.options.is_native else where.append(there)
    if "restartPolicy" not in wanted:
        there.pop("restartPolicy", None)
    kept = {"env", "volumeMounts", *({"resources"} if there.get("resources") else ())}
    if pod.options.image is None and there.get("image"):
        kept.add("image")
    overlay(there, _plain({key: value for key, value in wanted.items() if key not in kept}))
    return there


def _first_place(init_containers: MutableSequence[Any]) -> int:
    return 1 if init_containers and init_containers[0].get("name") == made.HOOK else 0


def _installer(pod: Pod, secured: dict[str, Any]) -> None:
    init = growing(pod.spec, "initContainers", pod.place.spec_path, before=("containers",))
    ours = named(pod.spec["initContainers" if pod.options.is_native else "containers"], made.SIDECAR) or {}
    wanted = _plain(
        made.hook_installer(
            image=str(ours.get("image")),
            guaranteed=made.is_guaranteed(pod.spec),
            secured=secured,
            volume=pod.shared.name,
            directory=pod.shared.directory,
        )
    )
    wanted["volumeMounts"][0].update(_sub_path(pod))
    there = named(init, made.HOOK)
    if there is None:
        init.insert(0, wanted)
    else:
        overlay(there, {key: value for key, value in wanted.items() if key != "resources" or not there.get("resources")})


def _store(pod: Pod) -> str:
    """What was asked for, else what an earlier injection has written; by the rule of the sidecar's settings."""
    store = pod.options.store or store_that_is_there(pod)
    if store is None:
        raise NotInjectable("", "--store is missing: where do the checkpoints go? Such as s3://bucket/runs/{name}")
    try:
        store_place(store, bucket=ANY_BUCKET, volume=Path(pod.shared.directory))
    except ValueError as error:
        raise NotInjectable("", f"--store {shown(store)} {error}") from None
    return store


def our_container(pod: Pod) -> Fields | None:
    """Return the sidecar of an earlier injection."""
    found = (named(entries(pod.spec, key, pod.place.spec_path), made.SIDECAR) for key in ("initContainers", "containers"))
    return next(filter(None, found), None)


def store_that_is_there(pod: Pod) -> str | None:
    """Return the store of an earlier injection."""
    ours = our_container(pod)
    env = named(entries(ours, "env", made.SIDECAR), "CKPT_STORE") if ours else None
    return str(env["value"]) if env and env.get("value") else None


def _plain(value: Any) -> Any:
    """A copy in which nothing is shared: YAML would show shared parts as anchors."""
    return json.loads(json.dumps(value))
