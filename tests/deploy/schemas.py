"""What an API server would say: Kubernetes' own schemas, Trainer's and JobSet's models, and rules that no schema has."""

from __future__ import annotations

import importlib
import io
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource
from ruamel.yaml import YAML

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
CRDS = Path(__file__).parent / "crds"
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))
OLD_VERSIONS = ("1.25", "1.28")
_SCHEMAS = files("kubernetes_validate").joinpath("kubernetes-json-schema")
_MODELS = {
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "JobSet": "JobsetV1alpha2JobSet",
}
_CLOSED = {
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule"),
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "kubeflow.org/v1": ("PyTorchJob",),
    "ray.io/v1": ("RayCluster", "RayJob"),
}
"""Kinds whose schemas lie in crds/."""
_NOT_AT_HAND = ("AppWrapper", "LeaderWorkerSet", "MPIJob", "RayCronJob")
"""Kinds of which only the pods are held against a schema."""


def documents(text: str) -> list[Any]:
    return [document for document in YAML(typ="safe", pure=True).load_all(io.StringIO(text)) if document is not None]


def pod_templates(node: Any) -> Iterator[dict[str, Any]]:
    """Every pod template of a document, found by its look and not by what the code under test knows of kinds."""
    if isinstance(node, dict):
        spec = node.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list) and "replicas" not in spec:
            yield {key: node[key] for key in ("metadata", "spec") if key in node}
        for value in node.values():
            yield from pod_templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from pod_templates(value)


@cache
def _validator(version: str, name: str) -> Any:
    folder = _SCHEMAS.joinpath(f"v{version}.0-local-strict")
    schema = json.loads(folder.joinpath(f"{name}.json").read_text())
    definitions = Resource.from_contents(json.loads(folder.joinpath("_definitions.json").read_text()))
    return jsonschema.Draft202012Validator(schema, registry=definitions @ Registry())


def complaints(document: dict[str, Any], version: str) -> list[str]:
    """Return what is wrong with a document; the pods of third-party kinds are held against the core schema."""
    kind, api_version = document["kind"], document["apiVersion"]
    group = api_version.rpartition("/")[0]
    said = []
    if group in (
        "",
        "batch",
        "apps",
        "policy",
        "networking.k8s.io",
        "admissionregistration.k8s.io",
        "rbac.authorization.k8s.io",
    ):
        name = "-".join(filter(None, (kind.lower(), group.split(".")[0], api_version.rpartition("/")[2])))
        said += _errors(_validator(version, name), document)
    elif kind in _MODELS:
        if version == VERSIONS[-1]:
            said += _of_model(document)
    elif kind in _CLOSED.get(api_version, ()):
        said += _errors(_closed(kind.lower()), document)
    elif kind not in _NOT_AT_HAND:
        said.append(f"no schema is known of {api_version} {kind}")
    said += _job_rules(document)
    if kind != "TrainJob":
        for template in pod_templates(document):
            said += _errors(_validator(version, "podtemplatespec-v1"), template)
            said += _pod_rules(template["spec"], native=version >= "1.29")
    return said


@cache
def _closed(name: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads((CRDS / f"{name}.json").read_text()))


def _of_model(document: dict[str, Any]) -> list[str]:
    """Trainer's and JobSet's own models, and of Trainer 2.1 what 2.3 does not know any more."""
    spec = {key: value for key, value in document["spec"].items() if key != "podTemplateOverrides"}
    model = getattr(importlib.import_module("kubeflow_trainer_api.models"), _MODELS[document["kind"]])
    parsed = model.from_dict({**document, "spec": spec}).to_dict()
    said = [f"{path} is not known" for path in _lost(_plain({**document, "spec": spec}), parsed)]
    return said + _errors(_closed("podtemplateoverrides"), document["spec"].get("podTemplateOverrides", []))


def _errors(validator: Any, instance: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(instance)]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _lost(given: Any, parsed: Any, path: str = "") -> Iterator[str]:
    """Paths of what a model did not keep: it drops unknown fields, as an API server does."""
    if isinstance(given, dict):
        for key, value in given.items():
            if value is not None and not (isinstance(parsed, dict) and key in parsed):
                yield f"{path}.{key}"
            else:
                yield from _lost(value, parsed[key] if parsed else None, f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from _lost(value, parsed[index], f"{path}[{index}]")


def _pod_rules(spec: dict[str, Any], *, native: bool) -> Iterator[str]:
    """Validation of core/v1 that lies in code, not in the schema (pkg/apis/core/validation)."""
    init, main = spec.get("initContainers") or [], spec["containers"]
    everyone = [*init, *main]
    names = [container["name"] for container in everyone]
    volumes = [volume["name"] for volume in spec.get("volumes") or []]
    for kind, found in (("container", names), ("volume", volumes)):
        if len(set(found)) != len(found):
            yield f"two of one {kind} name: {found}"
    for container in everyone:
        mounts = container.get("volumeMounts") or []
        paths = [mount["mountPath"] for mount in mounts]
        if len(set(paths)) != len(paths):
            yield f"{container['name']}: two mounts at one path"
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f"{container['name']}: no volume {mount['name']}"
        for entry in container.get("env") or []:
            if not isinstance(entry.get("value", ""), str):
                yield f"{container['name']}: {entry['name']} is no string"
    for container in init:
        restarts = container.get("restartPolicy")
        if restarts not in (None, "Always") or (restarts and not native):
            yield f"{container['name']}: restartPolicy {restarts}"
        if restarts is None and {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & set(container):
            yield f"{container['name']}: an init container that ends has no probes"
    ports = [(port["containerPort"], port.get("protocol")) for c in everyone for port in c.get("ports") or []]
    if spec.get("hostNetwork") and len(set(ports)) != len(ports):
        yield f"two of one port: {ports}"


def _job_rules(node: Any) -> Iterator[str]:
    """Validation of batch/v1 that lies in code (pkg/apis/batch/validation): what a podFailurePolicy goes together with."""
    if isinstance(node, list):
        for value in node:
            yield from _job_rules(value)
    elif isinstance(node, dict):
        for value in node.values():
            yield from _job_rules(value)
        of_set = node["failurePolicy"] if isinstance(node.get("failurePolicy"), dict) else {}
        for rule in of_set.get("rules") or ():  # JobSet's webhook
            if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]):
                yield f"no name of a rule: {rule['name']}"
        if "podFailurePolicy" in node:
            spec = node["template"]["spec"]
            names = {container["name"] for key in ("containers", "initContainers") for container in spec.get(key) or ()}
            if spec.get("restartPolicy") != "Never":
                yield f"podFailurePolicy needs restartPolicy Never, not {spec.get('restartPolicy')}"
            if node.get("podReplacementPolicy") not in (None, "Failed"):
                yield "podFailurePolicy needs podReplacementPolicy Failed"
            for rule in node["podFailurePolicy"]["rules"]:
                codes = rule.get("onExitCodes") or {"values": [1], "operator": "In"}
                if bool(rule.get("onExitCodes")) == bool(rule.get("onPodConditions")):
                    yield f"a rule has either exit codes or conditions: {rule}"
                if codes.get("containerName", "") and codes["containerName"] not in names:
                    yield f"no container {codes['containerName']}"
                is_sorted = codes["values"] == sorted(set(codes["values"]))
                if not codes["values"] or not is_sorted or (codes["operator"] == "In" and 0 in codes["values"]):
                    yield f"exit codes {codes}"
