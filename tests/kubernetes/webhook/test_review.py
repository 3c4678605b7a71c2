from __future__ import annotations

import base64
import datetime
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from jsonpointer import resolve_pointer

from sidecar.kubernetes.inject import Options, inject
from sidecar.kubernetes.inject.options import LABEL, with_given
from sidecar.kubernetes.webhook import review
from sidecar.kubernetes.webhook.patch import patch_of
from tests.deploy.pods import workloads
from tests.deploy.schemas import VERSIONS, complaints
from tests.ports import free_port

HOST = "webhook.checkpoint-sidecar.svc"
DEFAULTS = {"store": "s3:///runs/{namespace}/{name}", "secret": "data-connection", "image": "registry.example/x:1"}


def write_certificate(folder: Path, serial: int) -> None:
    """A self-signed pair under the service's name, put into place as kubelet does it: a new folder, and a link renamed over."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key(), serial_number=serial)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    version = folder / f"..{serial}"
    version.mkdir()
    (version / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (version / "tls.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    (folder / "..new").symlink_to(version.name)
    (folder / "..new").rename(folder / "..data")


class Webhook:
    """The running process, asked as the API server asks: over TLS, by the service's name."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, int]:
        """Return the status, the answer and the serial number of the certificate that the server showed."""
        context = ssl.create_default_context(cafile=str(self.folder / "tls.crt"))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=context)
        connection.sock = context.wrap_socket(socket.create_connection(("127.0.0.1", self.port)), server_hostname=HOST)
        shown = x509.load_der_x509_certificate(connection.sock.getpeercert(binary_form=True) or b"")
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text), shown.serial_number

    def review(self, found: dict[str, Any]) -> dict[str, Any]:
        status, answer, _ = self.request("POST", "/mutate", json.dumps(admission(found)).encode())
        assert status == 200
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert answer["response"]["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        return answer["response"]


def admission(found: dict[str, Any]) -> dict[str, Any]:
    """As an API server of 1.31 sends it."""
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "requestKind": {"group": "", "version": "v1", "kind": "Pod"},
            "requestResource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "research",
            "operation": "CREATE",
            "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
            "object": found,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    }


def pod(labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "llama-0-",
            "labels": {"checkpoint-sidecar/inject": "true", "batch.kubernetes.io/job-name": "llama"} | (labels or {}),
            "annotations": annotations or {},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "llama", "uid": "u", "controller": True}],
        },
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i"}], **spec},
    }


@pytest.fixture(scope="module")
def webhook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    folder = tmp_path_factory.mktemp("tls")
    write_certificate(folder, 1)
    for name in ("tls.crt", "tls.key"):
        (folder / name).symlink_to(f"..data/{name}")
    port = free_port()
    environment = {f"CKPT_INJECT_{name.upper()}": value for name, value in DEFAULTS.items()}
    command = [sys.executable, "-m", "sidecar", "webhook", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key")],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Webhook(folder, port)
    for _ in range(300):
        try:
            running.request("GET", "/healthz")
            break
        except OSError:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
    running.review(pod())
    yield running
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    # The nodes may not know yet that it goes.
    assert running.review(pod())["allowed"], "it serves for a while after SIGTERM"
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=20)[0]
    assert process.returncode == 0, out
    assert '"event": "sidecar_injected"' in out


def patched(found: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    assert response["patchType"] == "JSONPatch"
    return jsonpatch.apply_patch(found, json.loads(base64.b64decode(response["patch"])))


def test_a_pod_that_asks_for_it_gets_what_the_command_would_give_it(webhook: Webhook) -> None:
    found = pod(annotations={"checkpoint-sidecar/grace": "90", "checkpoint-sidecar/CKPT_KEEP_STORE": "3", "other/note": "x"})
    response = webhook.review(found)
    assert response["allowed"]
    options = with_given(Options(), DEFAULTS | {"store": "s3:///runs/research/llama", "grace": "90", "CKPT_KEEP_STORE": "3"})
    made = patched(found, response)
    assert made == inject(found, options).document
    assert complaints(made, VERSIONS[-1]) == []
    assert any("nothing here starts the hook" in warning for warning in response["warnings"])
    assert max(map(len, response["warnings"])) <= 256
    assert "patch" not in webhook.review(made)


def test_an_answer_names_annotations_not_flags_and_asks_for_nothing_that_the_controller_decides(webhook: Webhook) -> None:
    """Who applies a Job has no command line; a StatefulSet or a Ray cluster allows no other restart policy."""
    found = pod(restartPolicy="Always")
    said = "\n".join(webhook.review(found)["warnings"])
    assert "use checkpoint-sidecar/install-hook" in said
    assert " --" not in said
    assert "restartPolicy" not in said
    del found["metadata"]["ownerReferences"]
    assert "spec.restartPolicy: Always" in "\n".join(webhook.review(found)["warnings"])


def test_what_does_not_ask_is_let_through_as_it_is(webhook: Webhook) -> None:
    for found in (
        pod({"checkpoint-sidecar/inject": "false"}),
        {**pod(), "metadata": {"name": "x"}},
        {"kind": "PodExecOptions"},
    ):
        assert webhook.review(found) == {"uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "allowed": True}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            pod(containers=[{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]),
            "spec.containers: which one trains, a, b? Say it with checkpoint-sidecar/trainer-container",
        ),
        (pod(annotations={"checkpoint-sidecar/graze": "9"}), "checkpoint-sidecar/graze is not an option, did you mean grace?"),
        (pod(annotations={"checkpoint-sidecar/store": "/x"}), "checkpoint-sidecar/store='/x' must be s3://bucket/prefix"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(webhook: Webhook, found: dict[str, Any], message: str) -> None:
    response = webhook.review(found)
    assert not response["allowed"]
    assert response["status"]["code"] == 422
    assert message in response["status"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]", b"\xff", b'{"apiVersion": "admission.k8s.io/v1beta1", "request": {"uid": "x"}}']
)
def test_what_is_no_review_is_answered_as_a_bad_request(webhook: Webhook, body: bytes) -> None:
    status, _, _ = webhook.request("POST", "/mutate", body)
    assert status in (400, 422)


def test_a_new_certificate_is_served_without_a_restart_and_a_broken_one_is_not(webhook: Webhook) -> None:
    write_certificate(webhook.folder, 2)
    for _ in range(100):
        try:
            _, _, serial = webhook.request("GET", "/healthz")
            break
        except ssl.SSLCertVerificationError:  # still the old one, which the new file does not vouch for
            time.sleep(0.1)
    assert serial == 2
    good = (webhook.folder / "tls.key").read_bytes()
    (webhook.folder / "..2/tls.key").write_bytes(b"not a key")
    time.sleep(2.5)
    assert webhook.request("GET", "/healthz")[2] == 2
    (webhook.folder / "..2/tls.key").write_bytes(good)


def test_it_does_not_start_without_a_certificate_or_with_an_unknown_default(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sidecar", "webhook", "--tls-cert", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the certificate cannot be loaded" in done.stderr
    for wrong, said in {
        "CKPT_INJECT_STOER": "option stoer is not an option, did you mean store?",
        "CKPT_RESUME_FOREIGN": "CKPT_RESUME_FOREIGN is not a setting any more",
    }.items():
        environment = {**os.environ, wrong: "true"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
        assert done.returncode == 2
        assert said in done.stderr


@examples(max_examples=40)
@given(workloads())
def test_the_patch_of_a_review_gives_the_injected_document_and_touches_only_what_changes(document: dict[str, Any]) -> None:
    chosen = with_given(Options(), {"store": "s3://bucket/x", "trainer-container": "main", "dir": "/elsewhere"})
    document["metadata"]["labels"] = {**document["metadata"].get("labels", {}), LABEL: "true"}
    group, _, version = document["apiVersion"].rpartition("/")
    asked = admission(document)
    asked["request"]["kind"] = {"group": group, "version": version, "kind": document["kind"]}
    response = review.answer(asked, chosen)["response"]
    injected = inject(document, chosen).document
    assert as_json(patched(document, response)) == as_json(injected)
    for operation in json.loads(base64.b64decode(response["patch"])):
        assert operation["op"] in ("add", "replace"), operation
        if operation["op"] == "replace":
            before, after = (resolve_pointer(d, operation["path"]) for d in (document, injected))
            assert as_json(before) != as_json(after)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["", "a", "~/"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b/~", "~1"]), inner, max_size=3),
    max_leaves=12,
)


@given(JSON, JSON)
def test_the_patch_turns_one_document_into_the_other(old: Any, new: Any) -> None:
    patch = list(patch_of({"x": old}, {"x": new}))
    assert as_json(jsonpatch.apply_patch({"x": old}, patch)) == as_json({"x": new})  # to Python, 1 and true are equal
    assert bool(patch) == (as_json(old) != as_json(new))


def as_json(document: Any) -> str:
    return json.dumps(document, sort_keys=True)
