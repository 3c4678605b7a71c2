"""An injection that a notebook asks for: a patch of a TrainJob's pods, since a TrainJob cannot add containers.

A patch of a container needs that container in the runtime, and has no image, command or restart policy (Trainer 2.1 to 2.3). So
the sidecar comes from one of two places: the webhook, which the pods' label and annotations ask for it, or a runtime that
``inject`` has changed, whose sidecar gets the variables of this run. Both take the options of ``inject``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject.documents import inject
from sidecar.kubernetes.inject.options import ANNOTATION, LABEL, Options, with_given
from sidecar.kubernetes.inject.train_job import MANAGER
from sidecar.store_url import shown

STORE_MOUNT = "/store"
"""Where the sidecar mounts the claim of a ``pvc://`` store."""
_CLAIM = re.compile(r"pvc://([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)(/.*)?", re.ASCII)


def store_options(store: str) -> dict[str, str]:
    """Return the options for a store as a notebook names it.

    ``store``: ``s3://bucket/prefix``, or ``pvc://claim/folder`` as the Kubeflow SDK has it.

    Raises:
        ConfigurationError: It is neither.
    """
    if store.startswith("s3://"):
        return {"store": store}
    found = _CLAIM.fullmatch(store)
    if found is None:
        raise ConfigurationError(f"store={shown(store)!r} must be s3://bucket/prefix or pvc://claim/folder")
    folder = (found[3] or "").strip("/")
    if not folder:
        raise ConfigurationError(f"store={store!r} needs a folder for the run, such as {store.rstrip('/')}/{{name}}")
    return {"store": f"file://{STORE_MOUNT}/{folder}", "claim": found[1]}


def pod_annotations(given: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations by which the webhook injects with these options.

    Raises:
        ConfigurationError: An option that does not exist, or a value that is not valid.
    """
    with_given(Options(), given, prefix="")
    return {f"{ANNOTATION}{name}": text for name, text in given.items()}


def webhook_patch(given: Mapping[str, str], pods: tuple[str, ...]) -> dict[str, Any]:
    """Return an entry of ``spec.runtimePatches`` whose pods ask the webhook for the sidecar. Raises as ``pod_annotations``."""
    metadata = {"labels": {LABEL: "true"}, "annotations": pod_annotations(given)}
    jobs = [{"name": pod, "template": {"spec": {"template": {"metadata": dict(metadata)}}}} for pod in pods]
    return {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def runtime_patch(
    given: Mapping[str, str], pods: tuple[str, ...], *, nodes: int | None, name: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return an entry of ``spec.runtimePatches`` for a runtime that has the sidecar, and the trainer's variables.

    Args:
        given: Options by the name of their flag.
        pods: The runtime's replicated jobs that train.
        nodes: Of the TrainJob; ``None``: the runtime's.
        name: Of the TrainJob; ``None``: the SDK invents one.

    Raises:
        ConfigurationError: An option that does not exist, or a value that is not valid.
        NotInjectable: The store cannot be had.
    """
    options = with_given(Options(pods=pods), given, prefix="")
    metadata = {"name": name} if name else {"generateName": "train-"}
    spec = {"runtimeRef": {"name": "the runtime"}, **({"trainer": {"numNodes": nodes}} if nodes else {})}
    document = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": metadata, "spec": spec}
    made = inject(document, options).document["spec"]
    [patch] = made["runtimePatches"]
    variables = (made.get("trainer") or {}).get("env") or []
    return patch, {entry["name"]: entry["value"] for entry in variables}
