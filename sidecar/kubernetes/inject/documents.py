"""Injection into one parsed document. No I/O."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from sidecar.kubernetes.inject import train_job
from sidecar.kubernetes.inject.fields import Fields, metadata_of
from sidecar.kubernetes.inject.identity import nodes_of, put_env_injection
from sidecar.kubernetes.inject.injection import put_in
from sidecar.kubernetes.inject.options import Options, in_store
from sidecar.kubernetes.inject.pod_templates import (
    BY_WEBHOOK,
    Kind,
    PodTemplate,
    group_of,
    kind_of,
    nested,
    pod_somewhere,
    pod_templates_of,
)
from sidecar.kubernetes.inject.pods import Pod, look_at
from sidecar.kubernetes.inject.preemption import put_failure_policy
from sidecar.kubernetes.inject.recalled import chosen_pods, has_sidecar, remember_pods
from sidecar.kubernetes.inject.reports import UNEXPECTED_TYPE, InjectWarning, NotInjectable, unexpected_type
from sidecar.kubernetes.inject.roles import warning_of_ray_groups, warning_of_ray_head, without_helpers
from sidecar.kubernetes.inject.trainer import has_trainer
from sidecar.kubernetes.inject.warnings import warnings_of
from sidecar.kubernetes.inject.workload import NAMESPACE, name_in_store


@dataclass(frozen=True, slots=True)
class Injected:
    """The new document, warnings, the number of pod templates with the sidecar, and the store of each run."""

    document: Any
    warnings: tuple[InjectWarning, ...] = ()
    pods: int = 0
    stores: tuple[str, ...] = ()


def inject(document: Any, options: Options) -> Injected:
    """Put the sidecar into every pod template of a document that trains. A second injection changes nothing.

    ``document``: parsed YAML or JSON, which is not changed.

    Returns:
        The document itself where its kind has no pods, such as a Service.

    Raises:
        NotInjectable: A document that has pods and is not understood; says where.
    """
    return inject_in_place(copy.deepcopy(document), options)


def inject_in_place(document: Any, options: Options, *, inside: str = "", only_again: bool = False) -> Injected:
    """Inject into the document itself; a refused one is left half changed.

    Args:
        document: Parsed YAML or JSON. A copy of ruamel's would lose its merge keys.
        options: The requested options.
        inside: Path of this document within another that carries it.
        only_again: Leave a document without a sidecar as it is: no store is given, and others beside it have one.

    Raises:
        NotInjectable: As above.
    """
    if document is None:
        return Injected(document)
    if not isinstance(document, MutableMapping) or not document.get("kind"):
        raise NotInjectable(inside, "is no Kubernetes object: kind is missing")
    try:
        return _inject(document, options, only_again=only_again)
    except NotInjectable as error:
        path = ".".join(filter(None, (inside, error.path)))
        raise NotInjectable(path, error.why) from None
    except UNEXPECTED_TYPE as error:
        raise unexpected_type(inside, error) from error


def _inject(document: Fields, options: Options, *, only_again: bool) -> Injected:
    carried = nested(document)
    if carried is not None:
        return _inject_carried(document, carried, options, only_again=only_again)
    if only_again and not has_sidecar(document):
        return Injected(document)
    if options.only and not _is_chosen(document, options.only):
        return Injected(document)
    if (group_of(document), document["kind"]) == ("trainer.kubeflow.org", "TrainJob"):
        warnings = train_job.put_in(document, _filled_in(options, document, None))
        return Injected(document, tuple(warnings), pods=1)
    kind = kind_of(document)
    if kind is None:
        where = pod_somewhere(document)
        if where:
            text = f"a pod of kind {document['kind']} ({document.get('apiVersion')}), which is not known"
            raise NotInjectable(where, f"{text}: choose the others with --only KIND; this one's pods {BY_WEBHOOK}")
        return Injected(document)
    return _inject_kind(document, kind, _filled_in(options, document, kind))


def _is_chosen(document: Fields, only: tuple[str, ...]) -> bool:
    """Whether a document is of a chosen kind, or is the named one of it; kinds in any case, as kubectl takes them."""
    kind, name = str(document["kind"]).lower(), metadata_of(document).get("name")
    chosen = [text.partition("/") for text in only]
    return any(kind == wanted.lower() and (not slash or name == called) for wanted, slash, called in chosen)


def _inject_carried(document: Fields, carried: list[tuple[str, Fields]], options: Options, *, only_again: bool) -> Injected:
    only_again = only_again or (options.store is None and has_sidecar(document))
    warnings: list[InjectWarning] = []
    pods = 0
    stores: tuple[str, ...] = ()
    for path, inner in carried:
        done = inject_in_place(inner, options, inside=path, only_again=only_again)
        warnings += [replace(warning, path=f"{path}.{warning.path}") for warning in done.warnings]
        pods += done.pods
        stores += done.stores
    return Injected(document, tuple(warnings), pods, stores)


def _inject_kind(document: Fields, kind: Kind, options: Options) -> Injected:
    chosen, warnings = _chosen(document, kind, options)
    nodes, said = nodes_of(document, kind, chosen)
    warnings += [*said, *warning_of_ray_head(document, kind), *warning_of_ray_groups(kind, chosen)]
    found: list[Pod] = [look_at(template, options, nodes) for template in chosen]
    for pod in found:
        warnings += warnings_of(pod)
    stores: dict[str, None] = {}
    remember_pods(document, options)
    for pod in found:
        stores[put_in(pod)] = None
        put_failure_policy(pod)
        put_env_injection(pod.template)
    # A training runtime's store is a default: TrainJobs replace it.
    namespace = metadata_of(document).get("namespace") or NAMESPACE
    runs = () if kind.group == "trainer.kubeflow.org" else tuple(store.replace(NAMESPACE, namespace) for store in stores)
    return Injected(document, tuple(dict.fromkeys(warnings)), len(found), runs)


def _chosen(document: Fields, kind: Kind, options: Options) -> tuple[list[PodTemplate], list[InjectWarning]]:
    """Return the pods that get a sidecar: those that are named, else those that train."""
    chosen, wanted_pods = pod_templates_of(document, kind), chosen_pods(document, options)
    if wanted_pods:
        chosen = [template for template in chosen if template.name in wanted_pods]
        if not chosen:
            raise NotInjectable(kind.pods[0], f"none is called {', '.join(wanted_pods)}")
    with_trainer = [template for template in chosen if has_trainer(template, options)]
    if not with_trainer:
        wanted = options.trainer_container or kind.trainer
        raise NotInjectable(kind.pods[0], f"no pod has a container {wanted!r}: --trainer-container")
    return (with_trainer, []) if wanted_pods else without_helpers(document, kind, with_trainer)


def _filled_in(options: Options, document: Fields, kind: Kind | None) -> Options:
    """Fill in ``{namespace}`` and ``{name}``, so that one default gives each run its own prefix.

    The namespace is the one that the pod runs in: what a manifest says may be missing, or replaced when it is applied.
    """
    store = options.store
    if store is None or "{" not in store:
        return options
    name = name_in_store(document, kind) if "{name}" in store else ""
    if name is None:
        raise NotInjectable("metadata.name", f"is missing, and --store {store} needs it")
    return replace(options, store=in_store(store, namespace=NAMESPACE, name=name))
