"""The Helm chart on a cluster: installed, used, upgraded, and removed without a trace."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import make_namespace, remove_namespace
from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import Namespace, Object, kubectl, until
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story, assert_no_step_was_lost
from tests.cluster.test_webhook import STEPS, asking
from tests.cluster.workloads import SECRET, Workloads
from tests.deploy.helm import CHART, helm

RELEASE = "ckpt"
FULL_NAME = "ckpt-checkpoint-sidecar"
KINDS = "deployments,replicasets,pods,services,configmaps,secrets,serviceaccounts,poddisruptionbudgets,networkpolicies"


class Release:
    """The chart in a namespace of its own, whose webhook serves one other namespace."""

    def __init__(self, folder: Path, settings: ClusterSettings, serves: Namespace) -> None:
        self.namespace = make_namespace("restricted")
        self._values = folder / "values.json"
        repository, _, tag = settings.image.rpartition(":")
        values: dict[str, Any] = {
            # The webhook's configuration belongs to no namespace.
            "fullnameOverride": f"{FULL_NAME}-{self.namespace.name[-8:]}",
            "image": {"repository": repository, "tag": tag},
            "inject": {"store": f"s3://{settings.bucket}/{{namespace}}/{{name}}", "secret": SECRET},
            "webhook": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": serves.name}}},
            "replicas": 1,
            "podDisruptionBudget": {"minAvailable": 0},
            "networkPolicy": {"enabled": True},
            "monitoring": {"dashboard": {"enabled": True}},
        }
        if settings.user is not None:
            security = {"runAsNonRoot": True, "runAsUser": settings.user, "seccompProfile": {"type": "RuntimeDefault"}}
            values["podSecurityContext"] = security
        self.name = values["fullnameOverride"]
        self._values.write_text(json.dumps(values))

    def helm(self, *arguments: str) -> str:
        done = helm(*arguments, "--namespace", self.namespace.name)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.namespace.watch.report()}"
        return done.stdout

    def upgrade(self, *options: str) -> str:
        """Install or upgrade it, and wait until it serves."""
        more = ["--values", str(self._values), "--wait", "--timeout", "120s", *options]
        return self.helm("upgrade", "--install", RELEASE, str(CHART), *more)

    def uninstall(self) -> None:
        self.helm("uninstall", RELEASE, "--wait", "--timeout", "90s")

    def objects(self) -> list[str]:
        """Return what the release has in its namespace, and of what belongs to none."""
        found = self.namespace.kubectl("get", KINDS, "-o", "name").split()
        hooks = kubectl("get", "mutatingwebhookconfigurations", "-o", "name").split()
        given = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
        return sorted(set(found) - given) + [name for name in hooks if name.endswith(f"/{self.name}")]

    def trusted(self) -> bytes:
        """Return the certificates that the API server trusts."""
        hook: Object = json.loads(kubectl("get", "mutatingwebhookconfiguration", self.name, "-o", "json"))
        return base64.b64decode(hook["webhooks"][0]["clientConfig"]["caBundle"])

    def secret(self) -> Object:
        return self.namespace.get("secret", f"{self.name}-tls")


@pytest.fixture
def release(tmp_path: Path, settings: ClusterSettings, namespace: Namespace) -> Iterator[Release]:
    made = Release(tmp_path, settings, namespace)
    yield made
    helm("uninstall", RELEASE, "--namespace", made.namespace.name)
    kubectl("delete", "mutatingwebhookconfiguration", made.name, "--ignore-not-found")
    made.namespace.watch.close()
    remove_namespace(made.namespace.name)


def test_a_job_is_injected_by_an_installed_chart_that_leaves_nothing_behind(
    story: Story, workloads: Workloads, release: Release
) -> None:
    notes = release.upgrade()
    assert f"the Secret {SECRET}" in notes
    assert "WARNING" not in notes
    story.namespace.apply(asking(workloads))
    first = story.at_step(20)
    story.namespace.delete_pod(first.pod)
    assert story.weights() == weights_after(STEPS)
    assert_no_step_was_lost(*story.lives())
    story.completed()
    assert f"mutatingwebhookconfiguration.admissionregistration.k8s.io/{release.name}" in release.objects()
    release.uninstall()
    until(lambda: not release.objects(), what=lambda: f"nothing is left: {release.objects()}", every_s=1)


def test_an_upgrade_keeps_the_certificate_until_half_its_life_has_passed(release: Release) -> None:
    release.upgrade()
    first, trusted = release.secret()["data"], release.trusted()
    assert base64.b64decode(first["ca.crt"]) == trusted
    release.upgrade("--set", "webhook.timeoutSeconds=7")
    assert release.secret()["data"] == first
    assert release.trusted() == trusted
    secret = f"{release.name}-tls"
    release.namespace.kubectl("annotate", "--overwrite", "secret", secret, "checkpoint-sidecar/made=1000000000")
    # From version 4 on helm refuses to change a field that somebody else has set.
    release.upgrade(*(() if release.helm("version", "--short").startswith("v3") else ("--force-conflicts",)))
    renewed = release.secret()["data"]
    assert renewed["tls.crt"] != first["tls.crt"]
    assert release.trusted() == base64.b64decode(renewed["ca.crt"]) + trusted, "pods show the old one for a while"
    release.upgrade()
    assert release.secret()["data"] == renewed
    assert release.trusted() == base64.b64decode(renewed["ca.crt"])
