"""``doctor`` as a person, a Job or an init container runs it, against stores that work and stores that do not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import boto3
import pytest

from sidecar.core.format import keys
from sidecar.core.planning.store_diagnosis import NEEDS, Operation
from sidecar.errors import StoreUnavailable
from sidecar.standalone import transfer_rate
from sidecar.store.file.store import FileStore
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers
from tests.marks import slow
from tests.ports import free_port
from tests.servers import Proxy, ProxyAnswer, Request, s3_error
from tests.standalone.conftest import BUCKET, Person

PERMISSIONS = [f"permission:{operation.value}" for operation in Operation]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rate, "OBJECTS", 2)
    monkeypatch.setattr(transfer_rate, "OBJECT_BYTES", 1 << 20)


def by_check(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert all((found["next_step"] is None) is (found["severity"] == "ok") for found in answer["findings"])
    return {found["check"]: found for found in answer["findings"]}


def leftovers(person: Person) -> list[str]:
    with person.store() as store:
        return [*(found.key for found in store.list("")), *(upload.key for upload in store.pending_uploads(""))]


def test_a_sound_store_and_volume_pass_and_nothing_is_left(person: Person, tmp_path: Path) -> None:
    (volume := tmp_path / "volume").mkdir()
    answer = person.json("doctor", person.url, "--volume", str(volume), "--size", "1MB", "--save", "1s")
    found = by_check(answer)
    assert [name for name, finding in found.items() if finding["severity"] == "failure"] == []
    assert [found[check]["severity"] for check in PERMISSIONS] == ["ok"] * len(PERMISSIONS)
    assert {"verification", "conditional-put", "volume", "rename", "hard-links", "inotify", "space", "grace"} <= set(found)
    assert answer["measured"]["up_bytes_per_s"] > 0
    assert answer["measured"]["down_bytes_per_s"] > 0
    assert answer["exit_code"] == 0
    assert leftovers(person) == []
    assert list(volume.iterdir()) == []


def test_for_people_each_next_step_is_below_the_table(local: Person, tmp_path: Path) -> None:
    assert local.run("doctor", local.url, "--volume", str(tmp_path / "none")) == 2
    assert "volume: mount it in this container, or correct CKPT_DIR" in local.out
    assert local.out.endswith("1 failure, 0 warnings\n")


def test_a_grace_period_that_is_too_short_is_named_and_fails_only_when_asked(local: Person) -> None:
    given = ("doctor", local.url, "--size", "1000TB", "--grace", "2m")
    assert "grace" in by_check(local.json(*given))
    assert by_check(local.json(*given))["grace"]["severity"] == "warning"
    assert local.run(*given, "--strict") == 2


def test_a_setting_that_is_wrong_is_a_finding(local: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CONCURENCY", "4")
    found = by_check(local.json("doctor", local.url, code=2))
    assert "CKPT_CONCURENCY" in found["settings"]["text"]


def test_a_store_on_the_shared_volume_is_refused_as_the_sidecar_refuses_it(local: Person, tmp_path: Path) -> None:
    assert list(by_check(local.json("doctor", local.url, "--volume", str(tmp_path), code=2))) == ["settings"]


def test_without_a_store_it_says_how_to_name_one(local: Person) -> None:
    assert local.run("doctor") == 2
    assert "CKPT_STORE" in local.err


@pytest.mark.parametrize("kind", servers.REAL_STORES)
@pytest.mark.parametrize(
    ("name", "value"), [("AWS_ACCESS_KEY_ID", "nobody"), ("AWS_SECRET_ACCESS_KEY", "wrong")], ids=["key", "secret"]
)
def test_wrong_credentials_are_told_from_all_else(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, kind: str, name: str, value: str
) -> None:
    person = person_of(kind)
    monkeypatch.setenv(name, value)
    found = by_check(person.json("doctor", person.url, code=2))
    assert list(found) == ["credentials"]
    assert name in found["credentials"]["text"]


def test_no_credentials_at_all_are_told(person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch) -> None:
    person = person_of("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    assert list(by_check(person.json("doctor", person.url, code=2))) == ["credentials"]


def test_an_endpoint_of_a_profile_is_judged_as_one_of_the_settings(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    person = person_of("moto")
    monkeypatch.delenv("AWS_S3_ENDPOINT")
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {person.endpoint}\ns3 =\n  addressing_style = path\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert by_check(person.json("doctor", person.url))["tls"]["severity"] == "warning"


@pytest.mark.parametrize("kind", ["moto", *servers.REAL_STORES])
def test_a_bucket_that_is_not_there_is_told(person_of: Callable[[str], Person], kind: str) -> None:
    person = person_of(kind)
    assert list(by_check(person.json("doctor", "s3://no-such-bucket/run", code=2))) == ["bucket"]


def test_a_certificate_that_nobody_vouches_for_is_told(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    person = person_of("moto")
    context, certificate = servers.self_signed(tmp_path)
    with Proxy(person.endpoint, tls=context).running() as endpoint:
        monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
        assert list(by_check(person.json("doctor", person.url, code=2))) == ["tls"]
        monkeypatch.setenv("CKPT_CA_BUNDLE", str(certificate))
        assert by_check(person.json("doctor", person.url))["tls"]["severity"] == "ok"


def test_a_folder_that_cannot_be_made_is_told_at_once_with_what_helps(local: Person) -> None:
    began_s = time.monotonic()
    found = by_check(local.json("doctor", "file:///proc/nope/x", code=6))["reach"]
    assert time.monotonic() - began_s < 10
    assert found["text"] == "file:///proc/nope/x: the folder /proc/nope cannot be made: is its volume mounted?"
    assert found["next_step"].startswith("mount the volume of the store, or create its folder")
    assert local.err == ""


def test_what_failed_is_not_said_to_be_tried_again(local: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(store: FileStore) -> None:
        raise StoreUnavailable("file:///run: No space left on device; it is tried again")

    monkeypatch.setattr("sidecar.standalone.session.PATIENCE_S", 0.0)
    monkeypatch.setattr(FileStore, "probe", is_full)
    found = by_check(local.json("doctor", local.url, code=6))["reach"]
    assert found["text"] == "file:///run: No space left on device"
    assert found["next_step"].startswith("free space")


def test_a_store_out_of_reach_ends_with_its_own_code(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    person = person_of("moto")
    monkeypatch.setattr("sidecar.standalone.session.PATIENCE_S", 0.5)
    monkeypatch.setenv("AWS_S3_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert list(by_check(person.json("doctor", person.url, code=6))) == ["reach"]


def test_a_clock_that_the_store_refuses_is_told(person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch) -> None:
    person = person_of("moto")
    late = s3_error(403, "RequestTimeTooSkewed", Date="Mon, 01 Jan 2001 00:00:00 GMT")
    with Proxy(person.endpoint, lambda _: late).running() as endpoint:
        monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
        assert list(by_check(person.json("doctor", person.url, code=2))) == ["clock"]


def of_operation(request: Request) -> Operation | None:
    """Return which operation a request to S3 is."""
    query, method = request.query, request.method
    if "uploads" in query:
        return Operation.BEGIN if method == "POST" else Operation.LIST_UPLOADS
    if "uploadId" in query:
        return {
            "PUT": Operation.PART,
            "GET": Operation.LIST_PARTS,
            "POST": Operation.COMPLETE,
            "DELETE": Operation.ABORT,
        }[method]
    if "delete" in query:
        return Operation.DELETE
    if "list-type" in query:
        return Operation.LIST
    if method == "PUT":
        names = {name.lower() for name in request.headers}
        return Operation.COPY if "x-amz-copy-source" in names else Operation.PUT
    return {"GET": Operation.GET, "DELETE": Operation.DELETE}.get(method)


@pytest.mark.parametrize("denied", [Operation.PUT, *slow(*(one for one in Operation if one is not Operation.PUT))])
def test_each_operation_that_is_denied_is_named_with_its_permission_and_nothing_is_left(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, denied: Operation
) -> None:
    person = person_of("moto")

    def rule(request: Request) -> ProxyAnswer | None:
        return s3_error(403, "AccessDenied") if of_operation(request) is denied else None

    vital = denied not in (Operation.LIST_PARTS, Operation.LIST_UPLOADS, Operation.ABORT, Operation.COPY)
    with Proxy(person.endpoint, rule).running() as endpoint:
        monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
        found = by_check(person.json("doctor", person.url, code=2 if vital else 0))
    assert found[f"permission:{denied.value}"]["severity"] == ("failure" if vital else "warning")
    bad = {name for name in PERMISSIONS if name in found and found[name]["severity"] != "ok"}
    assert bad == {f"permission:{denied.value}"}
    assert leftovers(person) == []


def test_a_proxy_that_refuses_large_bodies_is_found_before_a_checkpoint_meets_it(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    person = person_of("moto")

    def rule(request: Request) -> ProxyAnswer | None:
        return (413, {"Content-Type": "text/html"}, b"<html></html>") if len(request.body) >= 1 << 20 else None

    with Proxy(person.endpoint, rule).running() as endpoint:
        monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
        found = by_check(person.json("doctor", person.url, code=2))
    assert found["rate"]["severity"] == "failure"
    assert "client_max_body_size" in found["rate"]["text"]
    assert leftovers(person) == []


@pytest.mark.rgw
@pytest.mark.parametrize(
    ("action", "denied"), [("s3:DeleteObject", "DeleteObjects"), ("s3:GetObject", "GetObject"), ("s3:PutObject", "PutObject")]
)
def test_a_real_server_that_denies_one_permission(
    person_of: Callable[[str], Person], rgw_endpoint: str, action: str, denied: str
) -> None:
    person = person_of("rgw")
    client = boto3.client(
        "s3",
        endpoint_url=rgw_endpoint,
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
        region_name=servers.REGION,
    )
    path = person.url.removeprefix("s3://")
    statement = {"Effect": "Deny", "Principal": "*", "Action": [action], "Resource": [f"arn:aws:s3:::{path}/*"]}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
    try:
        found = by_check(person.json("doctor", person.url, code=2))
    finally:
        client.delete_bucket_policy(Bucket=BUCKET)
        client.close()
    assert found[f"permission:{denied}"]["severity"] == "failure"
    assert action in found[f"permission:{denied}"]["next_step"]
    assert leftovers(person) == []


ACTIONS = [
    ("s3:ListBucket", Operation.LIST),
    ("s3:DeleteObject", Operation.DELETE),
    ("s3:PutObject", Operation.PUT),
    ("s3:GetObject", Operation.GET),
    ("s3:ListMultipartUploadParts", Operation.LIST_PARTS),
    ("s3:ListBucketMultipartUploads", Operation.LIST_UPLOADS),
    ("s3:AbortMultipartUpload", Operation.ABORT),
]


@pytest.mark.minio
@pytest.mark.parametrize(("action", "denied"), ACTIONS)
def test_a_user_of_minio_who_lacks_one_permission(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, action: str, denied: Operation
) -> None:
    person = person_of("minio")
    is_vital = NEEDS[denied].is_vital
    with monkeypatch.context() as patched:
        for name, value in user_without(action, str(person.endpoint)).items():
            patched.setenv(name, value)
        found = by_check(person.json("doctor", person.url, code=2 if is_vital else 0))
    finding = found[f"permission:{denied.value}"]
    assert (finding["severity"], action in finding["next_step"]) == ("failure" if is_vital else "warning", True)
    others = {name for name, each in found.items() if each["severity"] == "failure"} - {f"permission:{denied.value}"}
    assert others == set()
    assert leftovers(person) == []


def user_without(action: str, endpoint: str) -> dict[str, str]:
    """Return the credentials of a user of MinIO who may do everything but one action."""
    client = boto3.client(
        "sts",
        endpoint_url=endpoint,
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
        region_name=servers.REGION,
    )
    statements = [
        {"Effect": effect, "Action": [what], "Resource": ["arn:aws:s3:::*"]}
        for effect, what in (("Allow", "s3:*"), ("Deny", action))
    ]
    policy = json.dumps({"Version": "2012-10-17", "Statement": statements})
    user = client.assume_role(RoleArn="arn:aws:iam::1:role/any", RoleSessionName="doctor", Policy=policy)["Credentials"]
    client.close()
    return {
        "AWS_ACCESS_KEY_ID": user["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": user["SecretAccessKey"],
        "AWS_SESSION_TOKEN": user["SessionToken"],
    }


def _listens_to_sigint() -> None:
    """Tests in the background of a shell ignore it, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_doctor_that_is_ended_leaves_nothing_or_what_the_next_one_deletes(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    person = person_of("moto")
    is_sending: list[str] = []

    def rule(request: Request) -> ProxyAnswer | None:
        if "-rate-" in unquote(request.path) and request.method == "PUT":
            is_sending.append(request.path)
            time.sleep(0.3)
        return None

    with Proxy(person.endpoint, rule).running() as endpoint:
        environ = {**os.environ, "AWS_S3_ENDPOINT": endpoint}
        doctor = subprocess.Popen(
            [sys.executable, "-m", "sidecar", "doctor", person.url],
            env=environ,
            stdout=subprocess.DEVNULL,
            preexec_fn=_listens_to_sigint,
        )
        while not is_sending:
            assert doctor.poll() is None
            time.sleep(0.01)
        doctor.send_signal(how)
        code = doctor.wait()
        time.sleep(0.5)  # what the proxy had begun to pass on
    left = leftovers(person)
    if how is not signal.SIGKILL:
        assert (code, left) == (130, [])
        return
    assert all(key.startswith(keys.PROBE) for key in left)  # which probes delete after an hour (tests/store/s3)


def test_what_a_killed_doctor_left_on_the_volume_is_deleted_after_an_hour(local: Person, tmp_path: Path) -> None:
    (volume := tmp_path / "volume").mkdir()
    old, young, other = (volume / name for name in (f".ckpt-probe-{'0' * 32}", f".ckpt-probe-{'1' * 32}", ".ckpt-probe-mine"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    for folder in (old, other):
        os.utime(folder, (0, 0))
    assert local.run("doctor", local.url, "--volume", str(volume)) == 0
    assert set(volume.iterdir()) == {young, other}


@pytest.mark.slow
def test_a_store_that_is_slow_is_measured_in_a_bounded_time(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    person = person_of("moto")
    monkeypatch.setattr(transfer_rate, "OBJECTS", 1000)
    monkeypatch.setattr(transfer_rate, "MOST_S", 0.5)
    began_s = time.monotonic()
    answer = person.json("doctor", person.url)
    assert time.monotonic() - began_s < 60
    assert answer["measured"]["up_bytes_per_s"] > 0
    assert leftovers(person) == []


def test_a_younger_probe_of_another_process_is_left_alone(person_of: Callable[[str], Person]) -> None:
    person = person_of("moto")
    with person.store() as store, contextlib.ExitStack() as held:
        fd = os.memfd_create("other")
        held.callback(os.close, fd)
        store.put_file(f"{keys.PROBE}other", FileSlice(fd, 0, 0, gate=OpenGate(), with_md5=True))
        assert person.run("doctor", person.url) == 0
        assert [found.key for found in store.list(keys.PROBE)] == [f"{keys.PROBE}other"]
