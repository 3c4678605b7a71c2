"""What is found in a pod that is to get a sidecar."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.fields import Fields, entries, named, section
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.pod_templates import InjectWarning, NotInjectable, Place
from sidecar.kubernetes.inject.recalled import with_recalled
from sidecar.kubernetes.inject.trainer import trainer_index, warning_of_guess
from sidecar.kubernetes.inject.volumes import Shared, shared_volume

GRACE = "terminationGracePeriodSeconds"
_KUBERNETES_GRACE_S = 30


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, the options of its injection, and its containers and volumes. Paths are within the document."""

    place: Place
    spec: Fields
    trainer: Fields
    trainer_path: str
    shared: Shared
    grace_s: int
    options: Options
    node_count: int | None
    node_index_field: str | None
    guess: InjectWarning | None
    """What was taken for granted about the trainer."""


def look_at(place: Place, options: Options, *, pods: int | None, node_index_field: str | None = None) -> Pod:
    """Return what is needed to put the sidecar into a pod that has a trainer.

    Args:
        place: The pod template.
        options: The requested options; those not given keep the values of an earlier injection.
        pods: How many pods make one run, where the document says so.
        node_index_field: Field of the pod that holds its index among them.

    Raises:
        NotInjectable: The pod has something that is not understood, or that the sidecar cannot live with.
    """
    spec = section(place.template, "spec", place.path)
    path = place.spec_path
    if (spec.get("os") or {}).get("name") == "windows":
        raise NotInjectable(f"{path}.os.name", "the sidecar needs Linux")
    index = trainer_index(place, options)
    guess = next(warning_of_guess(place, options, index), None)
    trainer = spec["containers"][index]
    trainer_path = f"{path}.containers[{index}]"
    _check_ours(spec, path)
    options = with_recalled(place, options)
    grace_s = options.grace or spec.get(GRACE)
    if grace_s is not None and (not isinstance(grace_s, int) or grace_s < 1):
        raise NotInjectable(f"{path}.{GRACE}", f"{grace_s!r} leaves no time to save: give it seconds with --grace")
    shared = shared_volume(place, spec, trainer, trainer_path, options)
    grace_s = grace_s or _KUBERNETES_GRACE_S
    return Pod(place, spec, trainer, trainer_path, shared, grace_s, options, pods, node_index_field, guess)


def _check_ours(spec: Fields, path: str) -> None:
    for key in ("initContainers", "containers"):
        for index, container in enumerate(entries(spec, key, path)):
            if container.get("name") == made.SIDECAR and (container.get("command") or made.COMMAND)[-1] != "run":
                raise NotInjectable(f"{path}.{key}[{index}]", f"is called {made.SIDECAR} and is something else: rename it")


def our_container(pod: Pod) -> Fields | None:
    """Return the sidecar of an earlier injection."""
    found = (named(entries(pod.spec, key, pod.place.spec_path), made.SIDECAR) for key in ("initContainers", "containers"))
    return next(filter(None, found), None)


def store_that_is_there(pod: Pod) -> str | None:
    """Return the store of an earlier injection."""
    ours = our_container(pod)
    env = named(entries(ours, "env", made.SIDECAR), "CKPT_STORE") if ours else None
    return str(env["value"]) if env and env.get("value") else None
