"""The volumes of a pod: the one that trainer and sidecar share, and those of the sidecar alone."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.fields import Fields, containers_of, entries, growing, is_true, metadata_of, named, put_named
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.pod_templates import PodTemplate
from sidecar.kubernetes.inject.reports import InjectWarning, NotInjectable
from trainer_hook.contract import DEFAULT_DIR

_READ_ONLY = ("configMap", "secret", "downwardAPI", "projected", "image", "gitRepo")
"""Sources of volumes that hold no checkpoints. Kubernetes makes an emptyDir of a volume without a source."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared volume of one pod."""

    name: str
    directory: str
    mount: Fields | None
    """The trainer's, where it has one already."""
    volume: Fields | None
    """``None``: not there yet, or a claim that the workload makes."""

    @property
    def is_claim_template(self) -> bool:
        """Whether the workload makes a claim for it."""
        return self.mount is not None and self.volume is None


def shared_volume(template: PodTemplate, spec: Fields, trainer: Fields, trainer_path: str, options: Options) -> Shared:
    """Return the volume at the trainer's checkpoint directory; where there is none, the one to make.

    Raises:
        NotInjectable: It cannot hold checkpoints, or no name is left for one.
    """
    directory = options.dir or _directory(trainer, trainer_path)
    volumes = entries(spec, "volumes", template.spec_path)
    for index, mount in enumerate(entries(trainer, "volumeMounts", trainer_path)):
        if str(mount.get("mountPath", "")).rstrip("/") != directory:
            continue
        where = f"{trainer_path}.volumeMounts[{index}]"
        if is_true(mount.get("readOnly")):
            raise NotInjectable(f"{where}.readOnly", f"nothing can be saved in {directory}")
        volume = named(volumes, str(mount.get("name")))
        if volume is None and not _is_claim_template(template, str(mount.get("name"))):
            raise NotInjectable(f"{where}.name", f"there is no volume {mount.get('name')!r}")
        if volume is not None and any(kind in volume for kind in _READ_ONLY):
            raise NotInjectable(
                f"{template.spec_path}.volumes", f"{mount['name']!r} cannot hold checkpoints: mount another at {directory}"
            )
        if volume is not None and any(is_true(source.get("readOnly")) for source in _sources(volume)):
            text = f"{mount['name']!r} is readOnly: nothing can be saved in {directory}"
            raise NotInjectable(f"{template.spec_path}.volumes", text)
        return Shared(str(mount["name"]), directory, mount, volume)
    for name in (made.VOLUME, made.VOLUME_BESIDE):
        if named(volumes, name) is None and not _is_claim_template(template, name):
            return Shared(name, directory, None, None)
    raise NotInjectable(f"{template.spec_path}.volumes", f"{made.VOLUME} and {made.VOLUME_BESIDE} are both taken: rename one")


def _directory(trainer: Fields, trainer_path: str) -> str:
    """Return the shared directory as the trainer's environment names it."""
    env = named(entries(trainer, "env", trainer_path), "CKPT_DIR") or {}
    directory = str(env.get("value") or DEFAULT_DIR).rstrip("/")
    if not directory.startswith("/") or "$(" in directory:
        text = f"CKPT_DIR={directory!r} is no path for a volume, which is absolute and has no variables: name one with --dir"
        raise NotInjectable(f"{trainer_path}.env", text)
    return directory


def _sources(volume: Fields) -> Iterator[Fields]:
    return (source for source in volume.values() if isinstance(source, MutableMapping))


def warnings_of_mounts(trainer: Fields, trainer_path: str, shared: Shared) -> Iterator[InjectWarning]:
    """Yield warnings about other mounts of the trainer above or below the shared directory."""
    here = PurePosixPath(shared.directory)
    for index, mount in enumerate(entries(trainer, "volumeMounts", trainer_path)):
        other = PurePosixPath(str(mount.get("mountPath") or "/"))
        where = f"{trainer_path}.volumeMounts[{index}]"
        if here in other.parents:
            text = f"the sidecar does not see what is saved below {other}: mount {mount.get('name')!r} at {here} itself"
            yield InjectWarning(where, f"{text}, or save beside it")
        elif shared.mount is None and other in here.parents and other.name:
            text = f"the new volume at {here} hides the files that volume {mount.get('name')!r} has there"
            yield InjectWarning(where, f"{text}: give --dir {other}, or a directory outside of it")


def _is_claim_template(template: PodTemplate, name: str) -> bool:
    """Whether the workload makes a claim of that name for its pods: a StatefulSet, or a JobSet with volumeClaimPolicies."""
    claims: list[Any] = []
    for above in template.above:
        claims += above.get("volumeClaimTemplates") or []
        for policy in above.get("volumeClaimPolicies") or []:
            claims += policy.get("templates") or []
    return any(metadata_of(claim).get("name") == name for claim in claims)


def put_own_volume(spec: Fields, path: str, volume: dict[str, Any]) -> None:
    """Add a volume for the sidecar alone, or change the one of an earlier injection.

    Raises:
        NotInjectable: Another container mounts a volume of that name.
    """
    for where, container in containers_of(spec, path):
        mounts = entries(container, "volumeMounts", where)
        if container.get("name") not in (made.SIDECAR, made.DOCTOR) and named(mounts, volume["name"]) is not None:
            raise NotInjectable(f"{where}.volumeMounts", f"{volume['name']} is the sidecar's volume: rename yours")
    put_named(growing(spec, "volumes", path, after=("containers",)), volume)


def state_directory(directory: str, store: str) -> str:
    """Return where the sidecar's private volume is mounted: beside the shared one and a store that is a folder."""
    others = [directory, *([store.removeprefix("file://")] if store.startswith("file://") else [])]
    return next(path for path in made.STATE_DIRS if not any(_overlap(path, other) for other in others))


def _overlap(one: str, other: str) -> bool:
    return PurePosixPath(one).parts[1] == PurePosixPath(other).parts[1]
