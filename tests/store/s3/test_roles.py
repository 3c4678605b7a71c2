"""Credentials that are not given: those of a role, and files that cannot be read. The store is not to blame, nor the bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidecar.errors import AccessRefused, NoCredentials, StoreError, StoreUnavailable
from sidecar.store.s3 import client
from sidecar.store.s3.store import S3Store
from tests import servers
from tests.servers import s3_error
from tests.store.s3.conftest import Opener, always

NO_STORE = "http://127.0.0.1:1"


@pytest.fixture
def of_role(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], S3Store]:
    token = tmp_path / "token"
    token.write_text("the token of a service account")
    monkeypatch.setitem(client.FETCHING_CREDENTIALS, "retries", {"total_max_attempts": 1})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def opened(service: str) -> S3Store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service)
        return opener(NO_STORE, credentials_dir=None)

    return opened


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (403, "AccessDenied", NoCredentials),
        (400, "InvalidIdentityToken", NoCredentials),
        (400, "ExpiredTokenException", NoCredentials),
        (400, "Throttling", StoreUnavailable),
        (503, "ServiceUnavailable", StoreUnavailable),
    ],
)
def test_a_role_that_is_not_given_is_named(
    of_role: Callable[[str], S3Store], status: int, code: str, kind: type[StoreError]
) -> None:
    document = f"<ErrorResponse><Error><Code>{code}</Code><Message>why not</Message></Error></ErrorResponse>"
    with always((status, {"Content-Type": "text/xml"}, document.encode())).running() as service:
        store = of_role(service)
        with pytest.raises(kind, match=rf"no credentials \(AssumeRoleWithWebIdentity: {code}") as caught:
            store.get("k")
        assert type(caught.value) is kind
        assert "s3:" not in str(caught.value).removeprefix(store.url)
        store.close()


def test_a_token_that_is_not_mounted_is_named(
    of_role: Callable[[str], S3Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(NoCredentials, match=rf"no credentials .*{tmp_path}/missing"):
        of_role(NO_STORE).get("k")


def test_a_key_that_is_no_text_is_one_that_the_store_does_not_know(opener: Opener, tmp_path: Path) -> None:
    secret = servers.write_credentials(tmp_path / "secret")
    (secret / "AWS_ACCESS_KEY_ID").write_bytes(b"\xff\xfe")
    with (
        always(s3_error(403, "InvalidAccessKeyId")).running() as endpoint,
        pytest.raises(AccessRefused, match="AWS_ACCESS_KEY_ID"),
    ):
        opener(endpoint, credentials_dir=secret).get("k")


def test_a_service_of_credentials_that_is_silent_holds_up_no_termination_notice(of_role: Callable[[str], S3Store]) -> None:
    with servers.silent() as service, ThreadPoolExecutor(1) as threads:
        store = of_role(service)
        waiting = threads.submit(store.get, "k")
        time.sleep(0.5)
        began_s = time.monotonic()
        store.hurry(True)
        store.close()
        assert time.monotonic() - began_s < 1.0
        with pytest.raises(StoreUnavailable):
            waiting.result(10)
