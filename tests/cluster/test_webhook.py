"""The admission webhook behind a Service, in namespaces with the restricted pod security standard."""

from __future__ import annotations

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.cluster.conftest import LABEL, make_namespace, of_kind, remove_namespace
from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import Namespace, Object, Refused, apply, kubectl, until
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story, assert_no_step_was_lost, assert_two_train_jobs_are_two_runs
from tests.cluster.workloads import SECRET, Workloads

MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/webhook/webhook.yaml"
STEPS = 150
ASKS = {"labels": {"checkpoint-sidecar/inject": "true"}, "annotations": {"checkpoint-sidecar/grace": "60"}}


class Webhook:
    """The webhook of deploy/kubernetes/webhook in a namespace of its own, for the pods of one other namespace."""

    def __init__(self, folder: Path, settings: ClusterSettings, serves: Namespace) -> None:
        self._folder = folder
        self.namespace = make_namespace("restricted")
        self.name = self.namespace.name
        self._documents = [_adapted(found, self.name) for found in YAML(typ="safe").load_all(MANIFEST.read_text())]
        of_kind(self._documents, "ConfigMap")["data"] |= {
            "CKPT_INJECT_IMAGE": settings.image,
            "CKPT_INJECT_STORE": f"s3://{settings.bucket}/{{namespace}}/{{name}}",
            "CKPT_INJECT_SECRET": SECRET,
        }
        deployment = of_kind(self._documents, "Deployment")["spec"]
        deployment["replicas"] = 1
        pod = deployment["template"]["spec"]
        pod["containers"][0]["image"] = settings.image
        if settings.user is not None:
            pod["securityContext"]["runAsUser"] = settings.user
        self.certificate = self.new_certificate()
        [hook] = of_kind(self._documents, "MutatingWebhookConfiguration")["webhooks"]
        hook["clientConfig"]["caBundle"] = base64.b64encode(self.certificate).decode()
        hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": serves.name}}
        self.namespace.apply(
            *[found for found in self._documents if found["kind"] not in ("Namespace", "MutatingWebhookConfiguration")]
        )
        self.scale(1)
        apply(of_kind(self._documents, "MutatingWebhookConfiguration"))

    def remove(self) -> None:
        kubectl("delete", "mutatingwebhookconfiguration", self.name)
        self.namespace.watch.close()
        remove_namespace(self.name)

    def scale(self, replicas: int) -> None:
        self.namespace.kubectl("scale", "deployment", "webhook", f"--replicas={replicas}")
        self.namespace.kubectl("rollout", "status", "deployment", "webhook", "--timeout=90s")
        if not replicas:
            until(lambda: not self.namespace.living(), what="the webhook's pods are gone")

    def new_certificate(self) -> bytes:
        """Make a certificate, and bring it to the Secret as cert-manager does."""
        name, key, cert = f"webhook.{self.name}.svc", self._folder / "tls.key", self._folder / "tls.crt"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        more = ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(cert)]
        subprocess.run([*command, *more], check=True, capture_output=True)
        data = {"tls.crt": cert.read_text(), "tls.key": key.read_text()}
        secret = {"metadata": {"name": "webhook-tls"}, "type": "kubernetes.io/tls", "stringData": data}
        self.namespace.apply({"apiVersion": "v1", "kind": "Secret"} | secret)
        return cert.read_bytes()

    def trust(self, *certificates: bytes) -> None:
        """Have the API server trust these and no others."""
        bundle = base64.b64encode(b"".join(certificates)).decode()
        change = [{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
        kubectl("patch", "mutatingwebhookconfiguration", self.name, "--type=json", "-p", json.dumps(change))

    def served(self) -> bytes:
        """Return the certificate that it shows."""
        [pod] = self.namespace.living()
        show = "import ssl; print(ssl.get_server_certificate(('127.0.0.1', 8443)))"
        shown = self.namespace.kubectl("exec", pod["metadata"]["name"], "-c", "webhook", "--", "python3", "-c", show)
        return shown.strip().encode()


def _adapted(document: Object, namespace: str) -> Object:
    metadata = document["metadata"]
    if document["kind"] == "MutatingWebhookConfiguration":
        document["metadata"] = {"name": namespace, "labels": {LABEL: "true"}}
        document["webhooks"][0]["clientConfig"]["service"]["namespace"] = namespace
    else:
        metadata.pop("namespace", None)
    return document


@pytest.fixture
def webhook(tmp_path: Path, settings: ClusterSettings, namespace: Namespace) -> Iterator[Webhook]:
    made = Webhook(tmp_path, settings, namespace)
    yield made
    made.remove()


def asking(workloads: Workloads, *, name: str = "run") -> Object:
    """Return a Job whose pods ask for the sidecar; nothing else of it is about checkpoints."""
    pod = workloads.file_pod(STEPS=STEPS, SAVE_EVERY=1000)
    pod["metadata"] = ASKS
    return workloads.job(pod, name=name)


def test_a_plain_job_is_injected_and_resumes(story: Story, workloads: Workloads, webhook: Webhook) -> None:
    story.namespace.apply(asking(workloads))
    first = story.at_step(20)
    story.namespace.delete_pod(first.pod)
    assert story.weights() == weights_after(STEPS)
    assert_no_step_was_lost(*story.lives())
    story.completed()


@pytest.mark.usefixtures("trainer")
def test_two_train_jobs_of_one_plain_runtime_are_two_runs(story: Story, workloads: Workloads, webhook: Webhook) -> None:
    pod = workloads.pod(["python3", "/scripts/file_trainer.py"], container="node", STEPS=STEPS, SAVE_EVERY=1000)
    pod["metadata"] = ASKS
    story.namespace.apply(workloads.training_runtime(pod))
    assert_two_train_jobs_are_two_runs(story, workloads, steps=STEPS)


def test_without_the_webhook_only_pods_that_ask_for_it_wait(story: Story, workloads: Workloads, webhook: Webhook) -> None:
    webhook.scale(0)
    story.namespace.apply(
        asking(workloads), workloads.job(workloads.pod(["python3", "-c", "print('ran')"], container="plain"), name="plain")
    )
    Story(story.namespace, workloads, story.bucket, name="plain").completed()
    failed = until(lambda: story.namespace.events("FailedCreate"), what="the Job cannot make its pod", every_s=0.5)
    assert "failed calling webhook" in failed[0]["message"]
    webhook.scale(1)
    assert story.weights() == weights_after(STEPS)
    assert story.sidecars(), "the pod has a sidecar"


def test_a_rotated_certificate_is_served_without_a_restart(story: Story, workloads: Workloads, webhook: Webhook) -> None:
    [before] = webhook.namespace.living()
    new = webhook.new_certificate()
    webhook.trust(webhook.certificate, new)
    # Kubelets look at a pod's Secrets when they look at the pod.
    webhook.namespace.kubectl("annotate", "pod", before["metadata"]["name"], f"looked-at={time.time():.0f}")
    until(lambda: webhook.served() == new.strip(), what="the new certificate is served", timeout_s=180, every_s=2)
    webhook.trust(new)
    job = asking(workloads)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "dry", **ASKS}, "spec": job["spec"]["template"]["spec"]}

    def admitted() -> bool:
        try:
            made = story.namespace.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", given=json.dumps(pod))
        except Refused:
            return False
        return "checkpoint-sidecar" in made

    until(admitted, what="a pod is admitted", timeout_s=20)
    [after] = webhook.namespace.living()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
