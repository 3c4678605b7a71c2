"""Mistakes of a configuration: what a person must change. Each ends a sidecar with one sentence and exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from sidecar.core.format import keys
from sidecar.store.file.store import FileStore
from tests import servers
from tests.process.sidecar_process import sidecar

Settings = dict[str, str]
Case = Callable[[Path, ExitStack], Settings]


def of_folder(folder: Path) -> Settings:
    return {"CKPT_STORE": f"file://{folder / 'store'}"}


def _with_run(folder: Path, document: bytes) -> Settings:
    FileStore(folder / "store").put(keys.RUN, document)
    return of_folder(folder)


def another_job(folder: Path, _: ExitStack) -> Settings:
    settings = _with_run(folder, b'{"format": 1, "run_id": "theirs", "job": "team/other"}')
    return settings | {"POD_NAMESPACE": "team", "JOB_NAME": "mine"}


def another_run(folder: Path, _: ExitStack) -> Settings:
    return _with_run(folder, b'{"format": 1, "run_id": "theirs"}') | {"CKPT_RUN_ID": "mine"}


def another_run_that_is_alive(folder: Path, stack: ExitStack) -> Settings:
    stack.enter_context(sidecar(folder / "first", of_folder(folder) | {"JOB_NAME": ""})).ready()
    return of_folder(folder)


def foreign_document(folder: Path, _: ExitStack) -> Settings:
    return _with_run(folder, b"<html>")


def later_format(folder: Path, _: ExitStack) -> Settings:
    return _with_run(folder, b'{"format": 99, "run_id": "mine"}')


def file_in_the_place_of_the_store(folder: Path, _: ExitStack) -> Settings:
    (folder / "store").touch()
    return of_folder(folder)


def no_volume(folder: Path, _: ExitStack) -> Settings:
    return of_folder(folder) | {"CKPT_DIR": str(folder / "nowhere")}


def no_state_directory(folder: Path, _: ExitStack) -> Settings:
    (folder / "file").touch()
    return of_folder(folder) | {"CKPT_STATE_DIR": str(folder / "file" / "state")}


def no_place_for_the_hook(folder: Path, _: ExitStack) -> Settings:
    (folder / "file").touch()
    return of_folder(folder) | {"CKPT_INSTALL_HOOK": str(folder / "file" / "hook")}


def port_in_use(folder: Path, stack: ExitStack) -> Settings:
    server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return of_folder(folder) | {"CKPT_API_PORT": str(server.getsockname()[1])}


def unknown_setting(folder: Path, _: ExitStack) -> Settings:
    return of_folder(folder) | {"CKPT_GRACE_SECOND": "30"}


def wrong_value(folder: Path, _: ExitStack) -> Settings:
    return of_folder(folder) | {"CKPT_PART_SIZE": "many"}


def _of_bucket(endpoint: str) -> Settings:
    keys_of_store = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret", "AWS_DEFAULT_REGION": servers.REGION}
    return {"CKPT_STORE": "s3://a-bucket/run", "AWS_S3_ENDPOINT": endpoint} | keys_of_store


def _refusing(stack: ExitStack, status: int, code: str, **headers: str) -> Settings:
    answer = servers.s3_error(status, code, **headers)
    return _of_bucket(stack.enter_context(servers.Proxy(rule=lambda _: answer).running()))


def no_bucket(_: Path, stack: ExitStack) -> Settings:
    return _refusing(stack, 404, "NoSuchBucket")


def wrong_key(_: Path, stack: ExitStack) -> Settings:
    return _refusing(stack, 403, "InvalidAccessKeyId")


def wrong_secret(_: Path, stack: ExitStack) -> Settings:
    return _refusing(stack, 403, "SignatureDoesNotMatch")


def no_permission(_: Path, stack: ExitStack) -> Settings:
    return _refusing(stack, 403, "AccessDenied")


def another_region(_: Path, stack: ExitStack) -> Settings:
    return _refusing(stack, 301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-north-1"})


def no_credentials(_: Path, stack: ExitStack) -> Settings:
    settings = _refusing(stack, 403, "AccessDenied")
    return {name: value for name, value in settings.items() if "ACCESS_KEY" not in name}


def untrusted_certificate(folder: Path, stack: ExitStack) -> Settings:
    context, _ = servers.self_signed(folder)
    return _of_bucket(stack.enter_context(servers.Proxy(tls=context).running()))


def https_to_a_server_of_http(_: Path, stack: ExitStack) -> Settings:
    return _of_bucket(stack.enter_context(servers.Proxy().running()).replace("http:", "https:"))


def no_server_of_s3(_: Path, stack: ExitStack) -> Settings:
    page = 200, {"Content-Type": "text/html"}, b"<html>It works!</html>"
    return _of_bucket(stack.enter_context(servers.Proxy(rule=lambda _: page).running()))


CASES: dict[Case, str] = {
    another_job: "give each run its own prefix in CKPT_STORE",
    another_run: "or set CKPT_RUN_ID=theirs to go on with that run",
    another_run_that_is_alive: "give each run its own prefix in CKPT_STORE",
    foreign_document: "choose an empty prefix in CKPT_STORE",
    later_format: "update the sidecar",
    file_in_the_place_of_the_store: "remove one of them",
    no_volume: "mount the volume that the trainer writes to",
    no_state_directory: "mount an emptyDir there",
    no_place_for_the_hook: "is a file, not a folder",
    port_in_use: "is another sidecar running",
    unknown_setting: "CKPT_GRACE_SECONDS",
    wrong_value: "CKPT_PART_SIZE",
    no_bucket: "create it",
    wrong_key: "AWS_ACCESS_KEY_ID",
    wrong_secret: "AWS_SECRET_ACCESS_KEY",
    no_permission: "grant s3:ListBucket",
    another_region: "set AWS_DEFAULT_REGION to eu-north-1",
    no_credentials: "no credentials",
    untrusted_certificate: "CKPT_CA_BUNDLE",
    https_to_a_server_of_http: "does AWS_S3_ENDPOINT say https where the store speaks http",
    no_server_of_s3: "does AWS_S3_ENDPOINT name an S3 server",
}
"""Each with a part of its sentence."""


def is_one_sentence(code: int, stderr: str, message: str, *, about: str) -> None:
    """Check the end of a life that could not begin. ``message``: the termination message."""
    assert code == 2, stderr
    assert about in message
    [line] = stderr.splitlines()
    assert line.startswith("checkpoint-sidecar")
    assert line.endswith(message)
    assert "Traceback" not in stderr
    assert "ExceptionGroup" not in stderr
