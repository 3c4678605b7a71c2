"""A TrainJob cannot add containers: its runtime has the sidecar, and the TrainJob patches the variables of its own run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sidecar.kubernetes.inject import containers as made
from sidecar.kubernetes.inject.environment import put_variables
from sidecar.kubernetes.inject.fields import Fields, growing, named, put, put_named, section
from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.inject.recalled import chosen_pods, remember_pods, sidecars_in, store_in
from sidecar.kubernetes.inject.reports import InjectWarning, NotInjectable
from sidecar.kubernetes.inject.warnings import warning_of_name, warnings_of_shell
from sidecar.kubernetes.inject.workload import check_store, referred_to

MANAGER = "checkpoint-sidecar/inject"
_DEFAULT_POD = "node"


def put_in(document: Fields, options: Options) -> list[InjectWarning]:
    """Give the run its prefix, its grace period and its number of nodes; the trainer its settings.

    The form is ``runtimePatches``, or ``podTemplateOverrides`` where the document has them already (Trainer 2.1 and older).
    """
    spec = section(document, "spec", "")
    options = _with_recalled(document, spec, options)
    remember_pods(document, options)
    warnings = [*warning_of_name(document, options.store or ""), *_warnings(spec, options)]
    env = _sidecar_environment(document, spec, options)
    for pod in options.pods or (_DEFAULT_POD,):
        patched = _override(spec, pod) if "podTemplateOverrides" in spec else _patch(spec, pod, options)
        containers = growing(patched, "initContainers" if options.is_native else "containers", "spec")
        put_variables(growing(_named(containers, made.SIDECAR), "env", made.SIDECAR), env)
    settings = options.trainer_settings()
    if options.grace:
        settings["CKPT_GRACE_SECONDS"] = str(options.grace)
        settings["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(options.grace)
    if settings:
        trainer_env = growing(section(spec, "trainer", "spec"), "env", "spec.trainer")
        for name, value in settings.items():
            put_named(trainer_env, {"name": name, "value": value})
    return warnings


def _with_recalled(document: Fields, spec: Fields, options: Options) -> Options:
    """Return the options; options that are not given are those of an earlier injection of this TrainJob."""
    patches = [spec.get("runtimePatches"), spec.get("podTemplateOverrides")]
    ours = list(sidecars_in(patches))
    if not ours:
        return options
    mode = options.mode
    if mode == "auto" and options.kubernetes_version is None:
        mode = "native" if ours[0][0] == "initContainers" else "classic"
    return replace(options, store=options.store or store_in(patches), mode=mode, pods=chosen_pods(document, options))


def _sidecar_environment(document: Fields, spec: Fields, options: Options) -> dict[str, Any]:
    nodes = (spec.get("trainer") or {}).get("numNodes")
    env: dict[str, Any] = {
        **referred_to(options.store or ""),
        **({"CKPT_STORE": options.store} if options.store else {}),
        **({"CKPT_GRACE_SECONDS": str(options.grace)} if options.grace else {}),
        **({"CKPT_NODE_COUNT": str(nodes)} if isinstance(nodes, int) else {}),
        **options.sidecar_settings(),
    }
    if not options.store:
        raise NotInjectable("", "--store is missing: each run has its own prefix, such as s3://bucket/runs/{name}")
    check_store(options.store, document)
    return env


def _patch(spec: Fields, pod: str, options: Options) -> Fields:
    patch = _named(growing(spec, "runtimePatches", "spec"), MANAGER, key="manager")
    here: Any = patch
    for key in ("trainingRuntimeSpec", "template", "spec"):
        here = section(here, key, "spec.runtimePatches")
    here = _named(growing(here, "replicatedJobs", "spec.runtimePatches"), pod)
    for key in ("template", "spec", "template", "spec"):
        here = section(here, key, "spec.runtimePatches")
    if options.grace:
        put(here, "terminationGracePeriodSeconds", options.grace)
    fields: Fields = here
    return fields


def _override(spec: Fields, pod: str) -> Fields:
    overrides = growing(spec, "podTemplateOverrides", "spec")
    for override in overrides:
        if [target.get("name") for target in override.get("targetJobs") or ()] == [pod]:
            return section(override, "spec", "spec.podTemplateOverrides")
    overrides.append({"targetJobs": [{"name": pod}], "spec": {}})
    return section(overrides[-1], "spec", "spec.podTemplateOverrides")


def _named(items: Any, name: str, *, key: str = "name") -> Fields:
    there = named(items, name, key=key)
    if there is None:
        there = {key: name}
        items.append(there)
    return there


def _warnings(spec: Fields, options: Options) -> Iterator[InjectWarning]:
    yield from warnings_of_shell(spec.get("trainer") or {}, "spec.trainer")
    runtime = (spec.get("runtimeRef") or {}).get("name")
    text = f"a TrainJob cannot add containers: the sidecar must be in the runtime {runtime!r}; inject it there"
    yield InjectWarning("spec.runtimeRef", text, unless_injected=str(runtime))
    if "podTemplateOverrides" in spec and options.grace:
        text = "cannot set the grace period: write it into the runtime, the same number as --grace"
        yield InjectWarning("spec.podTemplateOverrides", text)
    if "podTemplateOverrides" not in spec and not options.grace:
        yield InjectWarning(
            "spec.runtimePatches", "the grace period is the runtime's; --grace sets another for this run (Trainer 2.3)"
        )
