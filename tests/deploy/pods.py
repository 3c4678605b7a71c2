"""Pods of every shape: hypothesis strategies for what people write, and the plain manifests of the repository."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.deploy.schemas import KUBERNETES

PLAIN = {path.stem: path.read_text() for path in sorted((KUBERNETES / "plain").glob("*.yaml"))}

_names = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True).filter(lambda name: not name.startswith("checkpoint"))
_texts = st.sampled_from(
    ["", "1", "true", "on", "0x1f", "1e3", "a: b", "# no", "x\ny", " lead", "'", '"', "null", "2026-01-01", "é"]
)
_env = st.lists(
    st.one_of(
        st.builds(lambda name, value: {"name": name.upper(), "value": value}, _names, _texts),
        st.sampled_from(
            [
                {"name": "CKPT_SAVE_STEPS", "value": "7"},
                {"name": "CKPT_GRACE_SECONDS", "value": "1"},
                {"name": "PYTHONPATH", "value": "/opt/a:/opt/b"},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ]
        ),
    ),
    max_size=4,
    unique_by=lambda entry: entry["name"],
)
_quantities = st.dictionaries(st.sampled_from(["cpu", "memory"]), st.sampled_from(["1", "2", "4"]))
_security = st.fixed_dictionaries({}, optional={"runAsUser": st.sampled_from([0, 1000]), "runAsGroup": st.just(1000)})


@st.composite
def _containers(draw: st.DrawFn, volumes: list[str], name: str) -> dict[str, Any]:
    mounts = [{"name": volume, "mountPath": f"/mnt/{volume}"} for volume in volumes if draw(st.booleans())]
    if "scratch" in volumes and draw(st.booleans()):
        mounts.append({"name": "scratch", "mountPath": "/checkpoints/"})
    container: dict[str, Any] = {"name": name, "image": "example/image:1"}
    if draw(st.booleans()):
        container["command"] = draw(st.sampled_from([["python", "t.py"], ["sh", "-c", "a; b"], ["bash", "-c", "x"]]))
    container |= draw(st.fixed_dictionaries({}, optional={"env": _env, "securityContext": _security}))
    if mounts or draw(st.booleans()):
        container["volumeMounts"] = mounts
    if draw(st.booleans()):
        container["resources"] = {"limits": draw(_quantities), "requests": draw(_quantities)}
    return container


@st.composite
def pod_specs(draw: st.DrawFn) -> dict[str, Any]:
    """A pod spec with at least one container, the first of which trains and is called ``main``."""
    kinds: dict[str, Any] = {
        "scratch": {"emptyDir": draw(st.sampled_from([{}, {"sizeLimit": "1Gi"}, {"medium": "Memory"}]))},
        "data": {"persistentVolumeClaim": {"claimName": "data"}},
        "checkpoints": {"configMap": {"name": "settings"}},
    }
    volumes = draw(st.lists(st.sampled_from(sorted(kinds)), unique=True))
    names = draw(st.lists(_names.filter(lambda name: name != "main"), max_size=3, unique=True))
    ready = [draw(_containers(volumes, name)) for name in names]
    spec: dict[str, Any] = {}
    if draw(st.booleans()):
        spec["restartPolicy"] = draw(st.sampled_from(["Never", "OnFailure"]))
    if draw(st.booleans()):
        spec["initContainers"] = ready[: len(ready) // 2]
    spec["containers"] = [draw(_containers(volumes, "main")), *ready[len(ready) // 2 :]]
    if volumes or draw(st.booleans()):
        spec["volumes"] = [{"name": name, **kinds[name]} for name in volumes]
    optional = {
        "terminationGracePeriodSeconds": st.integers(1, 900),
        "hostNetwork": st.booleans(),
        "securityContext": _security,
    }
    return spec | draw(st.fixed_dictionaries({}, optional=optional))


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """A document of one of the kinds whose schemas are at hand, around one pod spec."""
    spec = draw(pod_specs())
    template = {"spec": spec} | draw(st.sampled_from([{}, {"metadata": {"labels": {"app": "a"}}}]))
    metadata = {"name": "run", "namespace": "research"}
    job = {"template": template} | draw(
        st.sampled_from([{}, {"completions": 3, "parallelism": 3, "completionMode": "Indexed"}])
    )
    selector = {"matchLabels": {"app": "a"}}
    labelled = {**template, "metadata": {"labels": {"app": "a"}}}
    always = {**labelled, "spec": {key: value for key, value in spec.items() if key != "restartPolicy"}}
    chosen = draw(
        st.sampled_from(
            [
                {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
                {
                    "apiVersion": "batch/v1",
                    "kind": "CronJob",
                    "metadata": metadata,
                    "spec": {"schedule": "0 0 * * *", "jobTemplate": {"spec": job}},
                },
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "metadata": metadata,
                    "spec": {"selector": selector, "template": always},
                },
                {
                    "apiVersion": "apps/v1",
                    "kind": "StatefulSet",
                    "metadata": metadata,
                    "spec": {"selector": selector, "serviceName": "run", "replicas": 2, "template": always},
                },
                {
                    "apiVersion": "jobset.x-k8s.io/v1alpha2",
                    "kind": "JobSet",
                    "metadata": metadata,
                    "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": job}}]},
                },
            ]
        )
    )
    unshared: dict[str, Any] = json.loads(json.dumps(chosen))
    return unshared


def options() -> st.SearchStrategy[dict[str, str]]:
    """Options as they are given on a command line; those of one example go together."""
    return st.fixed_dictionaries(
        {
            "store": st.sampled_from(["s3://bucket/runs/{namespace}/{name}", "s3:///runs/x"]),
            "trainer-container": st.just("main"),
        },
        optional={
            "secret": st.just("data-connection"),
            "install-hook": st.sampled_from(["true", "false"]),
            "doctor": st.sampled_from(["true", "false"]),
            "mode": st.sampled_from(["auto", "native", "classic"]),
            "grace": st.sampled_from(["60", "300"]),
            "metrics-port": st.just("9471"),
            "api-port": st.just("9999"),
            "image": st.just("registry.example/sidecar:2"),
            "run-as-user": st.just("1234"),
            "save-steps": st.just("20"),
            "jit": st.sampled_from(["true", "false"]),
            "dir": st.sampled_from(["/checkpoints", "/mnt/scratch2"]),
            "CKPT_KEEP_STORE": st.just("3"),
            "CKPT_SUPERSEDED": st.just("skip"),
        },
    )
