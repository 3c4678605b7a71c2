"""The Helm chart: what it makes is valid, and says the same as the manifests for kustomize."""

from __future__ import annotations

import base64
import copy
import json
import os
import socket
import ssl
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sidecar.kubernetes.inject.options import FLAGS, from_environment
from tests.deploy import helm
from tests.deploy.schemas import VERSIONS, complaints, documents
from tests.deploy.test_kubernetes import KUBERNETES, kustomized
from tests.ports import free_port, served

VALUES = documents((helm.CHART / "values.yaml").read_text())[0]
SCHEMA = json.loads((helm.CHART / "values.schema.json").read_text())
SHA = "sha256:" + "0" * 64
EVERYTHING: dict[str, Any] = {
    "image": {"digest": SHA, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "inject": {
        "store": "s3://bucket/{namespace}/{name}",
        "secret": None,
        "cloud-identity": True,
        "grace": 120,
        "keep-store": 3,
    },
    "settings": {"CKPT_SSE": "aws:kms", "CKPT_PART_SIZE": 16777216},
    "certificate": {"from": "cert-manager", "issuerRef": {"name": "ours", "kind": "ClusterIssuer"}},
    "webhook": {
        "failurePolicy": "Ignore",
        "excludedNamespaces": [],
        "namespaceSelector": {
            "matchLabels": {"team": "ml"},
            "matchExpressions": [{"key": "environment", "operator": "In", "values": ["test"]}],
        },
    },
    "serviceAccount": {"name": "ours", "annotations": {"a": "b"}},
    "podLabels": {"team": "ml"},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "networkPolicy": {"enabled": True},
    "monitoring": {
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://git.mycompany.com/ml/"},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "ML"}},
    },
}
LITTLE: dict[str, Any] = {
    "podDisruptionBudget": {"enabled": False},
    "serviceAccount": {"create": False},
    "replicas": 1,
    "certificate": {"from": "existing", "secretName": "ours", "caBundle": "-----BEGIN CERTIFICATE-----\n"},
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "little": LITTLE,
    "openshift": {"certificate": {"from": "openshift"}},
    "cert-manager": {"certificate": {"from": "cert-manager"}},
}


def kinds(values: dict[str, Any], **more: str) -> dict[str, dict[str, Any]]:
    """Return the documents by their kind; of two ConfigMaps the webhook's."""
    found = helm.rendered(values, **more)
    return {document["kind"]: document for document in found if not document["metadata"]["name"].endswith("-dashboard")}


@pytest.mark.parametrize("case", CASES)
def test_helm_has_no_objection(case: str, tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(CASES[case]))
    checked = helm.helm("lint", "--strict", helm.CHART, "--values", tmp_path / "values.json")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("case", CASES)
def test_every_document_is_valid(case: str) -> None:
    found = helm.rendered(CASES[case])
    assert len(found) >= 4
    for document in found:
        assert [(version, said) for version in VERSIONS for said in complaints(document, version)] == [], document["kind"]
        assert document["kind"] == "MutatingWebhookConfiguration" or document["metadata"]["namespace"] == "checkpoint-sidecar"


def essence(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document without what differs by intention: labels, Helm's annotations, and the certificate."""
    found = copy.deepcopy(document)
    metadata = found["metadata"]
    for template in (metadata, found.get("spec", {}).get("template", {}).get("metadata", {})):
        template.pop("labels", None)
        template["annotations"] = {
            k: v for k, v in template.get("annotations", {}).items() if k != "checkpoint-sidecar/options"
        }
    text = json.dumps(found)
    for selector in (
        {"app.kubernetes.io/name": "checkpoint-sidecar-webhook"},
        {"app.kubernetes.io/name": "checkpoint-sidecar-webhook", "app.kubernetes.io/instance": "run"},
    ):
        text = text.replace(json.dumps(selector), '"SELECTOR"')
    found = json.loads(text)
    if found["kind"] == "MutatingWebhookConfiguration":
        found["metadata"]["name"] = "NAME"
        # Sets to an API server.
        for expression in found["webhooks"][0]["namespaceSelector"]["matchExpressions"]:
            expression["values"].sort()
    return found


@pytest.mark.parametrize(("folder", "certificate"), [("webhook", "cert-manager"), ("webhook-openshift", "openshift")])
def test_it_installs_what_kustomize_installs(folder: str, certificate: str) -> None:
    values = {"fullnameOverride": "webhook", "certificate": {"from": certificate}}
    plain = {document["kind"]: document for document in kustomized(folder)}
    del plain["Namespace"]  # helm install --create-namespace
    # A chart has one name for all its parts.
    text = json.dumps(plain).replace('"self-signed"', '"webhook"')
    expected = {kind: essence(document) for kind, document in json.loads(text).items()}
    assert {kind: essence(document) for kind, document in kinds(values).items()} == expected


def test_its_monitoring_is_that_of_kustomize() -> None:
    parts = {name: {"enabled": True} for name in ("podMonitor", "prometheusRule", "dashboard")}
    ours = ("run-checkpoint-sidecar-dashboard", "PodMonitor", "PrometheusRule")
    found = {d["kind"]: d for d in helm.rendered({"monitoring": parts}) if {d["kind"], d["metadata"]["name"]} & set(ours)}
    plain = {document["kind"]: document for document in kustomized("../monitoring")}
    assert set(found) == {"ConfigMap", "PodMonitor", "PrometheusRule"}
    for kind in ("PodMonitor", "PrometheusRule"):
        assert found[kind]["spec"] == plain[kind]["spec"]
    assert {k: v.strip() for k, v in found["ConfigMap"]["data"].items()} == {
        k: v.strip() for k, v in plain["ConfigMap"]["data"].items()
    }
    assert found["ConfigMap"]["metadata"]["labels"].items() >= plain["ConfigMap"]["metadata"]["labels"].items()


def test_the_alerts_link_to_the_runbook_that_is_named() -> None:
    [rule] = [document for document in helm.rendered(EVERYTHING) if document["kind"] == "PrometheusRule"]
    links = {alert["annotations"]["runbook_url"].partition("#")[0] for alert in rule["spec"]["groups"][0]["rules"]}
    assert links == {"https://git.mycompany.com/ml/OPERATIONS.md"}


@pytest.mark.parametrize("case", CASES)
def test_its_options_are_those_of_the_webhook(case: str) -> None:
    data = kinds(CASES[case])["ConfigMap"]["data"]
    options = from_environment(data)
    assert options.image == (
        f"registry.example/checkpoint-sidecar@{SHA}" if case == "everything" else data["CKPT_INJECT_IMAGE"]
    )
    if case == "everything":
        assert (options.secret, options.cloud_identity, options.grace) == (None, True, 120)
        assert dict(options.settings) == {"CKPT_SSE": "aws:kms", "CKPT_PART_SIZE": "16777216", "CKPT_KEEP_STORE": "3"}
        assert options.metrics_port == 9471, "a default that the values do not mention"


@pytest.mark.parametrize(("replicas", "is_there"), [(1, False), (2, True)])
def test_a_single_replica_has_no_budget_that_would_block_every_drain(replicas: int, is_there: bool) -> None:
    assert ("PodDisruptionBudget" in kinds({"replicas": replicas})) == is_there


def test_the_schema_knows_every_flag_of_inject_and_every_value() -> None:
    properties = SCHEMA["properties"]
    assert set(properties["inject"]["properties"]) == {flag.name for flag in FLAGS}
    assert set(properties) - {"global"} == set(VALUES)

    def closed(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        for name, value in values.items():
            assert name in schema.get("properties", {name: {}}), f"{path}.{name}"
            if isinstance(value, dict) and value:
                closed(schema["properties"][name], value, f"{path}.{name}")

    closed(SCHEMA, {name: value for name, value in VALUES.items() if SCHEMA["properties"][name].get("properties")}, "")


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"inject": {"stor": "s3:///x"}},
        {"inject": {"metrics-port": "9471"}},
        {"settings": {"AWS_PROFILE": "x"}},
        {"certificate": {"from": "nowhere"}},
        {"certificate": {"from": "existing"}},
        {"image": {"digest": "sha256:1"}},
        {"webhook": {"failurePolicy": "ignore"}},
    ],
    ids=json.dumps,
)
def test_a_value_that_is_wrong_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"schema|is needed"):
        helm.rendered(values)


def test_a_kubernetes_without_native_sidecars_is_refused() -> None:
    assert helm.rendered({}, kubernetes="1.29.3-eks-1")
    with pytest.raises(ValueError, match="kubeVersion"):
        helm.rendered({}, kubernetes="1.28.9")


def test_the_pods_are_of_the_restricted_standard() -> None:
    pod = kinds({})["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    [container] = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["resources"]["limits"]["memory"]
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize(("release", "namespace"), [("ckpt", "ml"), ("checkpoint-sidecar", "checkpoint-sidecar")])
def test_the_certificate_that_helm_makes_is_the_one_that_the_api_server_trusts(
    release: str, namespace: str, tmp_path: Path
) -> None:
    found = kinds({}, release=release, namespace=namespace)
    [hook] = found["MutatingWebhookConfiguration"]["webhooks"]
    where = hook["clientConfig"]["service"]
    for name, text in found["Secret"]["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    port = free_port()
    command = [sys.executable, "-m", "sidecar", "webhook", "--host", "127.0.0.1", "--port", str(port)]
    files = ["--tls-cert", str(tmp_path / "tls.crt"), "--tls-key", str(tmp_path / "tls.key")]
    context = ssl.create_default_context(cadata=base64.b64decode(hook["clientConfig"]["caBundle"]).decode())
    with subprocess.Popen(
        [*command, *files], env=os.environ | found["ConfigMap"]["data"], stderr=subprocess.DEVNULL
    ) as serving:
        try:
            names = _names_in_certificate(context, port, f"{where['name']}.{where['namespace']}.svc")
        finally:
            serving.terminate()
    assert names == [f"{where['name']}.{where['namespace']}.svc"]


def _names_in_certificate(context: ssl.SSLContext, port: int, host: str) -> list[str]:
    """Return the names in the certificate of a server that answers for a host, as soon as it does."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
                context.wrap_socket(plain, server_hostname=host) as tls,
            ):
                return [value for _, value in tls.getpeercert()["subjectAltName"]]  # type: ignore[index, misc]
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What Helm asks an API server while it renders: the objects by their paths, which a test changes."""
    found: dict[str, Any] = {"/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}}
    found["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
    kinds_of = {"v1": ("Secret", "ConfigMap", "Service", "ServiceAccount"), "apps/v1": ("Deployment",)}
    kinds_of |= {"policy/v1": ("PodDisruptionBudget",), "admissionregistration.k8s.io/v1": ("MutatingWebhookConfiguration",)}
    groups = []
    for version, names in kinds_of.items():
        made = [{"name": f"{kind.lower()}s", "singularName": kind.lower(), "kind": kind, "verbs": ["get"]} for kind in names]
        resources = [{**resource, "namespaced": resource["kind"] != "MutatingWebhookConfiguration"} for resource in made]
        listed = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        found[f"/apis/{version}" if "/" in version else f"/api/{version}"] = listed
        if "/" in version:
            known = {"groupVersion": version, "version": "v1"}
            groups.append({"name": version.partition("/")[0], "versions": [known], "preferredVersion": known})
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = found.get(self.path.partition("?")[0])
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.wfile.write(json.dumps(answer or missing).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    here = {"clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}]}
    here |= {"contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}]}
    (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c"} | here))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with served(server):
        yield found


def test_an_upgrade_keeps_the_certificate_and_renews_it_after_half_its_life(cluster: dict[str, Any]) -> None:
    path = "/api/v1/namespaces/checkpoint-sidecar/secrets/run-checkpoint-sidecar-tls"
    owned = {"meta.helm.sh/release-name": "run", "meta.helm.sh/release-namespace": "checkpoint-sidecar"}

    def upgrade(**certificate: int) -> tuple[dict[str, str], bytes]:
        options = ["--dry-run=server", "--disable-openapi-validation"]
        found = {document["kind"]: document for document in helm.rendered({"certificate": certificate}, *options)}
        cluster[path] = found["Secret"]
        cluster[path]["metadata"]["annotations"] |= owned
        [hook] = found["MutatingWebhookConfiguration"]["webhooks"]
        return found["Secret"]["data"], base64.b64decode(hook["clientConfig"]["caBundle"])

    first, trusted = upgrade()
    assert trusted == base64.b64decode(first["ca.crt"])
    assert upgrade() == (first, trusted)
    made = cluster[path]["metadata"]["annotations"]
    made["checkpoint-sidecar/made"] = str(int(made["checkpoint-sidecar/made"]) - 4 * 86_400)
    assert upgrade(days=9) == (first, trusted), "four days of nine"
    renewed, trusts_both = upgrade(days=7)
    assert renewed["tls.key"] != first["tls.key"]
    assert trusts_both == base64.b64decode(renewed["ca.crt"]) + trusted
    assert upgrade(days=7) == (renewed, base64.b64decode(renewed["ca.crt"]))


def test_the_packed_chart_has_the_files_that_are_links_in_the_repository(tmp_path: Path) -> None:
    done = helm.helm("package", helm.CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    [packed] = tmp_path.glob("*.tgz")
    monitoring = KUBERNETES.parent / "monitoring"
    with tarfile.open(packed) as archive:
        for name in ("dashboard.json", "pod-monitor.yaml", "prometheus-rule.yaml"):
            inside = archive.extractfile(f"checkpoint-sidecar/files/{name}")
            assert inside is not None
            assert inside.read() == (monitoring / name).read_bytes()


def test_the_readme_of_the_chart_explains_every_value() -> None:
    text = (helm.CHART / "README.md").read_text()
    for name in VALUES:
        assert f"`{name}" in text, name
