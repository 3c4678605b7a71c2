"""A pod template that gets a sidecar, with everything that the injection needs of it."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.fields import Fields, containers_of, section
from sidecar.kubernetes.inject.identity import Nodes
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.pod_templates import PodTemplate
from sidecar.kubernetes.inject.recalled import with_recalled
from sidecar.kubernetes.inject.reports import NotInjectable
from sidecar.kubernetes.inject.trainer import trainer_index
from sidecar.kubernetes.inject.volumes import Shared, shared_volume

GRACE = "terminationGracePeriodSeconds"
_KUBERNETES_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, the options of its injection, and its containers and volumes. Paths are within the document."""

    template: PodTemplate
    spec: Fields
    trainer: Fields
    trainer_path: str
    shared: Shared
    grace_s: int
    options: Options
    nodes: Nodes


def look_at(template: PodTemplate, options: Options, nodes: Nodes) -> Pod:
    """Find trainer, shared volume and grace period of a pod that has a trainer.

    Options that are not given keep the values of an earlier injection.

    Raises:
        NotInjectable: The pod has a field of an unknown form, or one that excludes the sidecar.
    """
    spec = section(template.fields, "spec", template.path)
    path = template.spec_path
    if (spec.get("os") or {}).get("name") == "windows":
        raise NotInjectable(f"{path}.os.name", "the sidecar needs Linux")
    index = trainer_index(template, options)
    trainer = spec["containers"][index]
    trainer_path = f"{path}.containers[{index}]"
    _check_ours(spec, path)
    options = with_recalled(template, options)
    grace_s = options.grace or spec.get(GRACE)
    if grace_s is not None and (not isinstance(grace_s, int) or grace_s < 1):
        raise NotInjectable(f"{path}.{GRACE}", f"{grace_s!r} leaves no time to save: give it seconds with --grace")
    shared = shared_volume(template, spec, trainer, trainer_path, options)
    grace_s = grace_s or _KUBERNETES_GRACE_S
    return Pod(template, spec, trainer, trainer_path, shared, grace_s, options, nodes)


def _check_ours(spec: Fields, path: str) -> None:
    for where, container in containers_of(spec, path):
        if container.get("name") == made.SIDECAR and (container.get("command") or made.COMMAND)[-1] != "run":
            raise NotInjectable(where, f"is called {made.SIDECAR} and is something else: rename it")


def our_container(pod: Pod) -> Fields | None:
    """Return the sidecar of an earlier injection."""
    found = (container for _, container in containers_of(pod.spec, pod.template.spec_path))
    return next((container for container in found if container.get("name") == made.SIDECAR), None)
