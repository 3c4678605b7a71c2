"""Manifests of the stories, as their owners would write them, and ``checkpoint-sidecar inject`` on them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.kubectl import Object
from tests.cluster.settings import ClusterSettings

SECRET = "data-connection"
SCRIPTS = "scripts"
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
FILES = {name: HERE / name for name in ("file_trainer.py", "node_trainer.py")} | {
    name: EXAMPLES / name for name in ("train_torch.py", "train_fsdp.py", "train_hf.py")
}


def scripts() -> Object:
    """Return a ConfigMap with the training scripts: no image of its own for each."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SCRIPTS},
        "data": {name: path.read_text() for name, path in FILES.items()},
    }


def secret(settings: ClusterSettings) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": settings.store_variables}


@dataclass(frozen=True)
class Workloads:
    """Makes manifests for one cluster."""

    settings: ClusterSettings

    def pod(self, command: list[str], *, torch: bool = False, container: str = "trainer", **environ: Any) -> Object:
        """Return a pod template that passes the restricted pod security standard, but for the folder of PyTorch."""
        settings = self.settings
        image = settings.trainer_image or settings.image
        if torch and settings.torch_image:
            image = settings.torch_image
        mounts = [{"name": SCRIPTS, "mountPath": "/scripts"}]
        volumes: list[Object] = [{"name": SCRIPTS, "configMap": {"name": SCRIPTS}}]
        variables = {"PYTHONUNBUFFERED": "1", "HOME": "/tmp", "USER": "trainer"} | {
            name: str(environ[name]) for name in environ
        }
        if torch and not settings.torch_image:
            mounts.append({"name": "packages", "mountPath": "/packages", "readOnly": True})  # type: ignore[dict-item]
            volumes.append({"name": "packages", "hostPath": {"path": settings.torch_packages, "type": "Directory"}})
            variables["PYTHONPATH"] = "/packages"
        security: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        if settings.user is not None:
            security |= {"runAsUser": settings.user, "fsGroup": settings.user}
        trainer = {
            "name": container,
            "image": image,
            "command": command,
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": mounts,
        }
        return {
            "metadata": {},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": security,
                "containers": [trainer],
                "volumes": volumes,
            },
        }

    def file_pod(self, **environ: Any) -> Object:
        return self.pod(["python3", "/scripts/file_trainer.py"], **environ)

    def job(self, pod: Object, *, name: str = "run", **spec: Any) -> Object:
        given = {"backoffLimit": 6, "template": pod} | spec
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": given}

    def indexed(self, pod: Object, *, name: str = "run", nodes: int = 2, **spec: Any) -> list[Object]:
        """Return a Job of several nodes, and the Service by which they find each other."""
        pod["spec"]["subdomain"] = name
        selector = {"batch.kubernetes.io/job-name": name}
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": service},
            self.job(pod, name=name, completions=nodes, parallelism=nodes, completionMode="Indexed", **spec),
        ]

    def jobset(self, pod: Object, *, name: str = "run", nodes: int = 2, max_restarts: int = 10) -> Object:
        inner = {"completions": nodes, "parallelism": nodes, "backoffLimit": 0, "template": pod}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": {"maxRestarts": max_restarts},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": inner}}],
            },
        }

    def training_runtime(self, pod: Object, *, max_restarts: int = 10, env_injection: bool = False) -> Object:
        """Return a TrainingRuntime; its pods train in their container ``node``. TrainJobs say how many there are.

        Args:
            pod: The template.
            max_restarts: Failures of a set that it survives.
            env_injection: Whether Trainer knows this field (2.3), by which sidecars learn the number of nodes.
        """
        labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
        job = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": {"template": pod}}}
        return {
            "apiVersion": TRAINER_API,
            "kind": "TrainingRuntime",
            "metadata": {"name": "durable", "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {
                "mlPolicy": {"numNodes": 1, "torch": {"envInjection": {}} if env_injection else {}},
                "template": {"spec": {"failurePolicy": {"maxRestarts": max_restarts}, "replicatedJobs": [job]}},
            },
        }

    def train_job(self, name: str = "run", *, nodes: int = 1) -> Object:
        spec = {"runtimeRef": {"kind": "TrainingRuntime", "name": "durable"}, "trainer": {"numNodes": nodes}}
        metadata = {"name": name}
        return {"apiVersion": TRAINER_API, "kind": "TrainJob", "metadata": metadata, "spec": spec}

    def injected(self, *documents: Object, options: tuple[str, ...] = (), store: str = "") -> str:
        """Return what ``checkpoint-sidecar inject`` makes of them, as YAML."""
        given = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
        where = ["--store", store or f"s3://{self.settings.bucket}/{{namespace}}/{{name}}"]
        where += [] if store.startswith("file:") else ["--secret", SECRET]
        image = ["--image", self.settings.image, "--install-hook"]
        command = [sys.executable, "-m", "sidecar", "inject", "-f", "-", *where, *image, *options]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout


def named(pod: Object, container: str) -> Object:
    """Return a container of a pod template."""
    spec = pod["spec"]
    found: Object = next(c for c in (*spec["containers"], *spec.get("initContainers", ())) if c["name"] == container)
    return found
