from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.main import main
from sidecar.kubernetes.inject.options import from_environment
from tests.deploy.schemas import KUBERNETES, VERSIONS, complaints, documents, pod_templates

PREFIX = "# checkpoint-sidecar "
MADE = sorted(
    path for path in [*KUBERNETES.glob("*.yaml"), *KUBERNETES.glob("component/*.yaml")] if path.read_text().startswith(PREFIX)
)
HELD = sorted(
    [*KUBERNETES.glob("*.yaml"), KUBERNETES / "webhook/webhook.yaml", KUBERNETES / "webhook/certificate.yaml"]
    + [KUBERNETES.parent / "monitoring" / name for name in ("pod-monitor.yaml", "prometheus-rule.yaml")]
)
FREE = {
    "labels",
    "annotations",
    "matchLabels",
    "nodeSelector",
    "stringData",
    "limits",
    "requests",
    "data",
    "rayStartParams",
    "selector",
    "pytorchReplicaSpecs",
}
"""Mappings whose keys are the user's."""
JOBS = [path for path in MADE if path.parent == KUBERNETES and not path.stem.startswith("trainjob")]


def name_of(path: Path) -> str:
    return str(path.relative_to(KUBERNETES.parent))


def pods(path: Path) -> list[dict[str, Any]]:
    return [template["spec"] for document in documents(path.read_text()) for template in pod_templates(document)]


def by_name(containers: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in containers}


def everyone(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return by_name([*pod.get("initContainers", []), *pod["containers"]])


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container.get("env", [])}


@pytest.mark.parametrize("path", MADE, ids=name_of)
def test_it_is_what_its_first_line_makes(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, _, rest = path.read_text().partition("\n")
    monkeypatch.chdir(path.parent)
    assert main(shlex.split(line.removeprefix(PREFIX))) == 0
    assert capsys.readouterr().out == rest, "run deploy/kubernetes/regenerate"


@pytest.mark.parametrize("path", HELD, ids=name_of)
def test_an_api_server_takes_it(path: Path) -> None:
    versions = ("1.25", "1.28", *VERSIONS) if path.stem == "job-classic" else VERSIONS
    found = documents(path.read_text())
    assert found
    for document in found:
        assert [(version, said) for version in versions for said in complaints(document, version)] == []


def mappings(node: Any, free: bool = False) -> Iterator[dict[str, Any]]:
    """Every mapping of a document whose keys are the schema's."""
    if isinstance(node, dict):
        if not free:
            yield node
        for key, value in node.items():
            yield from mappings(value, key in FREE)
    elif isinstance(node, list):
        for value in node:
            yield from mappings(value)


@pytest.mark.parametrize("path", HELD, ids=name_of)
def test_a_misspelt_field_would_be_seen(path: Path) -> None:
    for document in documents(path.read_text()):
        places = [place for place in mappings(document) if place is not document.get("metadata")]
        for place in random.Random(1).sample(places, min(12, len(places))):
            place["misspelt"] = "x"
            assert complaints(document, VERSIONS[-1]) != [], place
            del place["misspelt"]


@pytest.mark.parametrize("path", JOBS, ids=name_of)
def test_the_grace_period_is_the_same_in_all_places(path: Path) -> None:
    for pod in pods(path):
        found = everyone(pod)
        if "checkpoint-sidecar" not in found:
            continue
        trainer = next(name for name in found if not name.startswith("checkpoint-"))
        seconds = str(pod["terminationGracePeriodSeconds"])
        assert environment(found[trainer])["CKPT_GRACE_SECONDS"] == seconds
        assert environment(found["checkpoint-sidecar"])["CKPT_GRACE_SECONDS"] == seconds


@pytest.mark.parametrize("path", JOBS, ids=name_of)
def test_its_pods_are_of_the_restricted_standard(path: Path) -> None:
    """Pod Security Standards, "restricted", as far as these pods can break it; Ray's head is the user's own."""
    for pod in pods(path):
        found = everyone(pod)
        if "checkpoint-sidecar" not in found:
            assert set(found) == {"ray-head"}
            continue
        for container in found.values():
            secured = container["securityContext"]
            assert secured["allowPrivilegeEscalation"] is False
            assert secured["capabilities"] == {"drop": ["ALL"]}
            assert secured.get("runAsNonRoot", pod["securityContext"]["runAsNonRoot"]) is True
            assert secured.get("seccompProfile", pod["securityContext"]["seccompProfile"]) == {"type": "RuntimeDefault"}
        assert found["checkpoint-sidecar"]["securityContext"]["readOnlyRootFilesystem"] is True
        assert all("hostPath" not in volume for volume in pod["volumes"])


@pytest.mark.parametrize("path", JOBS, ids=name_of)
def test_probes_run_inside_and_the_notice_comes_at_once(path: Path) -> None:
    for pod in pods(path):
        sidecar = everyone(pod).get("checkpoint-sidecar")
        if sidecar is None:
            continue
        assert "checkpoint-sidecar" in by_name(pod["containers" if path.stem == "job-classic" else "initContainers"])
        for probe in ("startupProbe", "readinessProbe"):
            assert sidecar[probe]["exec"]["command"] == ["checkpoint-sidecar", "probe"]  # not --ready: nothing of the store
        assert sidecar["lifecycle"]["preStop"]["exec"]["command"] == ["checkpoint-sidecar", "drain"]
        assert sidecar["resources"]["limits"]["memory"]
        volume = next(volume for volume in pod["volumes"] if volume["name"] == "checkpoints")
        assert volume["emptyDir"] == {}


def test_jobs_ignore_preemption() -> None:
    for name in ("job", "job-irsa", "job-openshift"):
        *_, job = documents((KUBERNETES / f"{name}.yaml").read_text())
        rules = job["spec"]["podFailurePolicy"]["rules"]
        assert all(rule["onExitCodes"]["containerName"] == "trainer" for rule in rules if "onExitCodes" in rule)
        assert [143] in [
            rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "Ignore" and "onExitCodes" in rule
        ]


def test_on_openshift_no_user_is_fixed() -> None:
    [pod] = pods(KUBERNETES / "job-openshift.yaml")
    contexts = [pod["securityContext"], *(container["securityContext"] for container in everyone(pod).values())]
    assert not any({"runAsUser", "runAsGroup", "fsGroup"} & set(context) for context in contexts)


def test_with_a_role_the_other_containers_are_skipped_and_no_secret_is_mounted() -> None:
    [_, job] = documents((KUBERNETES / "job-irsa.yaml").read_text())
    skipped = job["spec"]["template"]["metadata"]["annotations"]["eks.amazonaws.com/skip-containers"].split(",")
    pod = job["spec"]["template"]["spec"]
    assert set(everyone(pod)) - set(skipped) == {"checkpoint-sidecar"}
    assert not any("secret" in volume for volume in pod["volumes"])
    [account] = documents((KUBERNETES / "service-account.yaml").read_text())
    assert pod["serviceAccountName"] == account["metadata"]["name"]


def test_the_secret_has_what_a_data_connection_has_and_is_the_one_that_is_mounted() -> None:
    [secret] = documents((KUBERNETES / "secret.yaml").read_text())
    names = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_S3_ENDPOINT", "AWS_DEFAULT_REGION", "AWS_S3_BUCKET"}
    assert set(secret["stringData"]) == names
    pod = pods(KUBERNETES / "job.yaml")[0]
    [volume] = [volume for volume in pod["volumes"] if "secret" in volume]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]


def test_a_train_job_finds_the_container_that_its_runtime_has() -> None:
    [runtime] = documents((KUBERNETES / "runtime.yaml").read_text())
    [train_job] = documents((KUBERNETES / "trainjob.yaml").read_text())
    [patch] = train_job["spec"]["runtimePatches"]
    [patched] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    [real] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert patched["name"] == real["name"]
    changes = by_name(patched["template"]["spec"]["template"]["spec"]["initContainers"])
    assert set(changes) <= set(by_name(real["template"]["spec"]["template"]["spec"]["initContainers"]))
    assert environment(changes["checkpoint-sidecar"])["CKPT_STORE"] == "s3:///runs/$(POD_NAMESPACE)/llama"
    seconds = patched["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert environment(train_job["spec"]["trainer"])["CKPT_GRACE_SECONDS"] == str(seconds)


def kustomized(folder: str) -> list[dict[str, Any]]:
    is_required = os.environ.get("CKPT_TEST_KUBECTL") == "required"
    kubectl = shutil.which("kubectl")
    if kubectl is None and not is_required:
        pytest.skip("kubectl is not installed: .ci/kubectl fetches one")
    assert kubectl is not None, "kubectl is not installed: .ci/kubectl fetches one"
    done = subprocess.run([kubectl, "kustomize", KUBERNETES / folder], capture_output=True, text=True, timeout=60, check=False)
    if "unknown field" in done.stderr and not is_required:
        pytest.skip(f"this kubectl is older than components: {done.stderr[:100]}")
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def test_the_component_brings_the_sidecar_and_one_annotation_sets_every_grace_period() -> None:
    [job] = kustomized("kustomize-example")
    assert [said for version in VERSIONS for said in complaints(job, version)] == []
    pod = job["spec"]["template"]["spec"]
    found = everyone(pod)
    assert pod["terminationGracePeriodSeconds"] == 300
    assert {environment(found[name])["CKPT_GRACE_SECONDS"] for name in ("trainer", "checkpoint-sidecar")} == {"300"}
    assert environment(found["checkpoint-sidecar"])["CKPT_STORE"] == "s3:///runs/llama"
    assert found["trainer"]["command"] == ["python", "train.py"]
    assert found["checkpoint-sidecar"]["image"] == "registry.example/checkpoint-sidecar:0.1.0"


@pytest.mark.parametrize("folder", ["webhook", "webhook-openshift"])
def test_the_webhook_is_reachable_by_its_certificate_and_takes_its_defaults(folder: str) -> None:
    found = {document["kind"]: document for document in kustomized(folder)}
    for kind in ("Namespace", "ConfigMap", "Deployment", "Service", "MutatingWebhookConfiguration", "PodDisruptionBudget"):
        assert [said for version in VERSIONS for said in complaints(found[kind], version)] == []
    [hook] = found["MutatingWebhookConfiguration"]["webhooks"]
    service, pod = found["Service"], found["Deployment"]["spec"]["template"]["spec"]
    names = {key: service["metadata"][key] for key in ("name", "namespace")}
    assert hook["clientConfig"]["service"] == {**names, "path": "/mutate"}
    assert hook["objectSelector"] == {"matchLabels": {"checkpoint-sidecar/inject": "true"}}
    [mounted] = [volume["secret"]["secretName"] for volume in pod["volumes"]]
    if folder == "webhook":
        certificate = found["Certificate"]["spec"]
        assert certificate["dnsNames"] == [f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"]
        assert certificate["secretName"] == mounted
    else:
        assert service["metadata"]["annotations"]["service.beta.openshift.io/serving-cert-secret-name"] == mounted
        assert found["MutatingWebhookConfiguration"]["metadata"]["annotations"] == {
            "service.beta.openshift.io/inject-cabundle": "true"
        }
    options = from_environment(found["ConfigMap"]["data"])
    assert (options.store, options.secret, options.install_hook) == ("s3:///runs/{namespace}/{name}", "data-connection", True)
    assert pod["containers"][0]["command"] == ["checkpoint-sidecar", "webhook"]
