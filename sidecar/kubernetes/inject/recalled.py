"""Options of an earlier injection: they stay unless they are given again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.fields import Fields, annotations_of, named, put, section
from sidecar.kubernetes.inject.options import ANNOTATION, Options
from sidecar.kubernetes.inject.pod_templates import PodTemplate
from sidecar.kubernetes.inject.trainer import TRAINER_ANNOTATION

PODS_ANNOTATION = f"{ANNOTATION}pods"
"""On the workload: the chosen pods (``--pods``)."""
_USER_ANNOTATION = f"{ANNOTATION}run-as-user"
SKIP_CONTAINERS = "eks.amazonaws.com/skip-containers"


def with_recalled(template: PodTemplate, options: Options) -> Options:
    """Return the options of one pod; options that are not given are those of an earlier injection."""
    spec = template.fields.get("spec") or {}
    init, main = spec.get("initContainers") or [], spec.get("containers") or []
    ours = named(init, made.SIDECAR) or named(main, made.SIDECAR)
    if ours is None:
        return options
    annotations = annotations_of(template.fields)
    recalled: dict[str, Any] = {}
    if options.mode == "auto" and options.kubernetes_version is None:
        recalled["mode"] = "classic" if named(main, made.SIDECAR) else "native"
    if named(init, made.HOOK) is not None or named(ours.get("env") or [], made.INSTALL_HOOK) is not None:
        recalled["install_hook"] = True
    if named(init, made.DOCTOR) is not None:
        recalled["doctor"] = True
    if options.run_as_user is None and str(annotations.get(_USER_ANNOTATION, "")).isdecimal():
        recalled["run_as_user"] = int(annotations[_USER_ANNOTATION])
    recalled |= _ports(ours, options)
    skipped = str(annotations.get(SKIP_CONTAINERS, "")).split(",")
    if not options.secret and made.SIDECAR not in skipped and _are_all_skipped(main, skipped):
        recalled["cloud_identity"] = True
    return replace(options, **recalled)


def _ports(ours: Fields, options: Options) -> dict[str, int]:
    env = {str(entry.get("name")): str(entry.get("value") or "") for entry in ours.get("env") or ()}
    api, metrics = env.get("CKPT_API_PORT", ""), re.fullmatch(r"0\.0\.0\.0:([0-9]+)", env.get("CKPT_METRICS_BIND", ""))
    return {
        **({"api_port": int(api)} if options.api_port is None and api.isdecimal() else {}),
        **({"metrics_port": int(metrics[1])} if options.metrics_port is None and metrics else {}),
    }


def _are_all_skipped(containers: Sequence[Fields], skipped: Sequence[str]) -> bool:
    names = {str(container.get("name")) for container in containers} - {made.SIDECAR}
    return bool(names) and names <= set(skipped)


def remember(template: PodTemplate, options: Options, trainer: str, *, is_guess: bool) -> None:
    """Record in the pod template's annotations the options that the next injection cannot find elsewhere."""
    said = {
        TRAINER_ANNOTATION: trainer if options.trainer_container or is_guess else None,
        _USER_ANNOTATION: None if options.run_as_user is None else str(options.run_as_user),
    }
    wanted = {name: value for name, value in said.items() if value is not None}
    if wanted:
        metadata = section(template.fields, "metadata", template.path, before=("spec",))
        annotations = section(metadata, "annotations", f"{template.path}.metadata")
        for name, value in wanted.items():
            put(annotations, name, value)


def chosen_pods(document: Fields, options: Options) -> tuple[str, ...]:
    """Return the chosen pods, of this injection or an earlier one; none: all that train."""
    recorded = str(annotations_of(document).get(PODS_ANNOTATION, ""))
    return options.pods or tuple(filter(None, (name.strip() for name in recorded.split(","))))


def remember_pods(document: Fields, options: Options) -> None:
    """Record the chosen pods in the workload's annotations."""
    if options.pods:
        metadata = section(document, "metadata", "", before=("spec",))
        put(section(metadata, "annotations", "metadata"), PODS_ANNOTATION, ",".join(options.pods))


def has_sidecar(node: Any) -> bool:
    """Whether an earlier injection left a sidecar anywhere in a document."""
    return any("env" in container for _, container in sidecars_in(node))


def store_in(node: Any) -> str | None:
    """Return the store of a sidecar that an earlier injection left in a document."""
    stores = (named(container.get("env") or [], "CKPT_STORE") or {} for _, container in sidecars_in(node))
    return next((str(store["value"]) for store in stores if store.get("value")), None)


def sidecars_in(node: Any, key: str = "") -> Iterator[tuple[str, Fields]]:
    """Yield the sidecar's containers and patches below a node, each with the name of its list."""
    if isinstance(node, dict):
        if node.get("name") == made.SIDECAR:
            yield key, node
        for name, value in node.items():
            yield from sidecars_in(value, str(name))
    elif isinstance(node, list):
        for value in node:
            yield from sidecars_in(value, key)
