"""What of a Kubernetes API server the SDK and the facade ask: real HTTP, the real webhook's review, no pods that run."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonpatch

from sidecar.kubernetes.inject.options import Options
from sidecar.kubernetes.webhook.review import answer
from tests.ports import served

TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
NAMESPACE = f"{TRAINER}/namespaces/research"


@dataclass
class Cluster:
    """A namespace ``research``. Fields are changed by tests."""

    runtime: dict[str, Any]
    webhook: Options | None = None
    """Its defaults; ``None``: there is no webhook."""
    refusal: tuple[int, str] | None = None
    """Status and message of every created pod."""
    schema: dict[str, Any] = field(default_factory=lambda: {"TrainJobSpec": {"properties": {"runtimePatches": {}}}})
    train_jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)
    created_pods: list[dict[str, Any]] = field(default_factory=list)
    """What clients posted, all of them with ``dryRun``."""
    url: str = ""

    def get(self, path: str) -> tuple[int, Any]:
        name = path.rpartition("/")[2]
        if path == f"/openapi/v3{TRAINER}":
            return 200, self.schema
        if path == f"{TRAINER}/clustertrainingruntimes/{self.runtime['metadata']['name']}":
            return 200, self.runtime
        if path == f"{NAMESPACE}/trainjobs/{name}" and name in self.train_jobs:
            return 200, self.train_jobs[name]
        if path == "/api/v1/namespaces/research/pods":
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": self.pods}
        return 404, status(404, f"{path} not found")

    def post(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, Any]:
        if path == f"{NAMESPACE}/trainjobs":
            self.train_jobs[body["metadata"]["name"]] = body
            return 201, body
        assert path == "/api/v1/namespaces/research/pods"
        assert query["dryRun"] == ["All"], "nothing is created by a check"
        self.created_pods.append(body)
        if self.refusal is not None:
            return self.refusal[0], status(*self.refusal)
        return self.admit(body)

    def admit(self, pod: dict[str, Any]) -> tuple[int, Any]:
        """Return the pod as it is created, or the webhook's refusal."""
        if self.webhook is None:
            return 201, pod
        request = {"uid": "u", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "namespace": "research", "object": pod}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        response = answer(review, self.webhook)["response"]
        if not response["allowed"]:
            return 422, status(422, f'admission webhook "x" denied the request: {response["status"]["message"]}')
        patch = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
        return 201, jsonpatch.apply_patch(pod, patch)


def status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


@contextmanager
def serve(cluster: Cluster) -> Iterator[Cluster]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*cluster.get(urlsplit(self.path).path))

        def do_POST(self) -> None:
            parts = urlsplit(self.path)
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer(*cluster.post(parts.path, parse_qs(parts.query), body))

        def _answer(self, code: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    with served(server):
        yield cluster
