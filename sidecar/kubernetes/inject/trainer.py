"""Which container of a pod trains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.fields import Fields, annotations_of, containers_of, entries, named, section
from sidecar.kubernetes.inject.options import ANNOTATION, Options
from sidecar.kubernetes.inject.pod_templates import PodTemplate
from sidecar.kubernetes.inject.reports import InjectWarning, NotInjectable

TRAINER_ANNOTATION = f"{ANNOTATION}trainer-container"
"""On the pod template: the chosen container. The webhook reads it as the flag of that name."""
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_ACCELERATOR = re.compile(
    r"(^|[./-])(gpu|tpu|npu|xpu|dcu|mlu|mig-.*|neuron.*|gaudi.*|i915|xe|ascend.*)([./-]|$)", re.IGNORECASE
)


def has_trainer(template: PodTemplate, options: Options) -> bool:
    """Whether the pod has the named trainer; where none is named, any container may be it."""
    wanted = _said(template, options)
    return wanted is None or named(_containers(template), wanted) is not None


def trainer_index(template: PodTemplate, options: Options) -> int:
    """Return the trainer's index among the containers.

    By its name (flag, earlier injection, convention of the kind); else by the variables of an earlier injection; else by an
    accelerator or kubectl's default container.

    Raises:
        NotInjectable: There is none, or several that could be it.
    """
    containers = _containers(template)
    path = f"{template.spec_path}.containers"
    names = [str(container.get("name")) for container in containers]
    others = [index for index, name in enumerate(names) if name != made.SIDECAR]
    if not others:
        raise NotInjectable(path, "no container that could train")
    wanted = _said(template, options)
    if wanted is not None:
        return names.index(wanted)
    if len(others) == 1 or template.kind.group == "ray.io":  # Ray's own container is the first
        return others[0]
    left = _left_by_injection(template, [containers[index] for index in others])
    hints = left or list(dict.fromkeys(_hints(template, [containers[index] for index in others])))
    if len(hints) != 1:
        said = f" ({' and '.join(hints)} are hinted at)" if hints else ""
        which = ", ".join(names[index] for index in others)
        raise NotInjectable(path, f"which one trains, {which}{said}? Say it with --trainer-container")
    return names.index(hints[0])


def _containers(template: PodTemplate) -> Sequence[Fields]:
    return entries(section(template.fields, "spec", template.path), "containers", template.spec_path)


def _said(template: PodTemplate, options: Options) -> str | None:
    """Return the name that the flag, an earlier injection or the kind's convention gives."""
    if options.trainer_container:
        return options.trainer_container
    recorded = annotations_of(template.fields).get(TRAINER_ANNOTATION)
    if recorded and named(_containers(template), str(recorded)) is not None:
        return str(recorded)
    return template.kind.trainer


def _left_by_injection(template: PodTemplate, containers: Sequence[Fields]) -> list[str]:
    """Return the containers with volume and variables that an earlier version gave to the trainer, without an annotation."""
    spec = section(template.fields, "spec", template.path)
    ours = named([container for _, container in containers_of(spec, template.spec_path)], made.SIDECAR)
    if ours is None:
        return []
    directory = (named(ours.get("env") or [], "CKPT_DIR") or {}).get("value")
    found = []
    for container in containers:
        env, mounts = container.get("env") or [], container.get("volumeMounts") or []
        has_directory = (named(env, "CKPT_DIR") or {}).get("value") == directory is not None
        if has_directory and named(mounts, str(directory), key="mountPath") is not None:
            found.append(str(container.get("name")))
    return found


def _hints(template: PodTemplate, containers: Sequence[Fields]) -> Iterator[str]:
    default = annotations_of(template.fields).get(_DEFAULT_CONTAINER)
    if default and named(containers, str(default)) is not None:
        yield str(default)
    with_accelerator = [str(container.get("name")) for container in containers if has_accelerator(container)]
    if len(with_accelerator) == 1:
        yield with_accelerator[0]


def has_accelerator(container: Fields) -> bool:
    """Whether a container asks for a GPU or another accelerator."""
    resources = container.get("resources") or {}
    wanted = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return any(_ACCELERATOR.search(str(name)) and str(count) != "0" for name, count in wanted.items() if "/" in str(name))


def warning_of_guess(template: PodTemplate, options: Options) -> Iterator[InjectWarning]:
    """Yield which container is taken for the trainer by a hint, the first time."""
    containers = [container for container in _containers(template) if container.get("name") != made.SIDECAR]
    is_certain = _said(template, options) or len(containers) == 1 or template.kind.group == "ray.io"
    if not is_certain and not _left_by_injection(template, containers):
        index = trainer_index(template, options)
        name = _containers(template)[index].get("name")
        text = f"{name} is taken for the trainer, by its accelerator or {_DEFAULT_CONTAINER}; another: --trainer-container"
        yield InjectWarning(f"{template.spec_path}.containers[{index}]", text)
