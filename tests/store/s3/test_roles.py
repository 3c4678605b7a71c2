"""Credentials that are not given: those of a role, and files that cannot be read. The store is not to blame, nor the bucket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from aiobotocore.session import AioSession

from sidecar.errors import AccessRefused, NoCredentials, NotFound, StoreError, StoreUnavailable
from sidecar.store.s3 import credentials
from sidecar.store.s3.store import S3Store
from tests import servers
from tests.servers import Proxy, ProxyAnswer, s3_error
from tests.store.conftest import BUCKET
from tests.store.s3.conftest import Opener, always

NO_STORE = "http://127.0.0.1:1"


@pytest.fixture
def of_role(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., S3Store]:
    token = tmp_path / "token"
    token.write_text("the token of a service account")
    monkeypatch.setitem(credentials.FETCHING, "retries", {"total_max_attempts": 1})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/trainer")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def opened(service: str, endpoint: str = NO_STORE, **options: object) -> S3Store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", service)
        return opener(endpoint, credentials_dir=None, **options)

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
    of_role: Callable[..., S3Store], status: int, code: str, kind: type[StoreError]
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
    of_role: Callable[..., S3Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_service_of_credentials_that_is_silent_holds_up_no_termination_notice(of_role: Callable[..., S3Store]) -> None:
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


def _keys(*, expire_in_s: float) -> ProxyAnswer:
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + expire_in_s))
    keys = "<AccessKeyId>a</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
    keys += f"<Expiration>{expires}</Expiration>"
    result = f"<AssumeRoleWithWebIdentityResult><Credentials>{keys}</Credentials></AssumeRoleWithWebIdentityResult>"
    document = f"<AssumeRoleWithWebIdentityResponse>{result}</AssumeRoleWithWebIdentityResponse>"
    return 200, {"Content-Type": "text/xml"}, document.encode()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ((200, {"Content-Type": "text/html"}, b"<html>log in</html>"), "KeyError"),
        ((200, {"Content-Type": "application/json"}, b"{}"), "ResponseParserError"),
        ((200, {"Content-Type": "text/xml"}, b""), "ResponseParserError"),
        (_keys(expire_in_s=-60), "still expired.*clock"),
    ],
)
def test_an_answer_without_usable_keys_is_one_without_credentials(
    of_role: Callable[..., S3Store], answer: ProxyAnswer, named: str
) -> None:
    with always(answer).running() as service:
        store = of_role(service)
        with pytest.raises(NoCredentials, match=f"no credentials .*{named}"):
            store.get("k")
        store.close()


def test_a_service_of_credentials_that_is_away_is_not_the_store(of_role: Callable[..., S3Store]) -> None:
    with pytest.raises(StoreUnavailable, match=rf"no credentials .*{NO_STORE}.*AWS_ENDPOINT_URL_STS"):
        of_role(NO_STORE).get("k")


def test_the_service_of_a_role_is_trusted_by_the_same_bundle(of_role: Callable[..., S3Store], tmp_path: Path) -> None:
    context, certificate = servers.self_signed(tmp_path)
    service = Proxy(rule=lambda _: _keys(expire_in_s=3600), tls=context)
    with always(s3_error(404, "NoSuchKey")).running() as endpoint, service.running() as address:
        with pytest.raises(NoCredentials, match=r"no credentials .*CKPT_CA_BUNDLE"):
            of_role(address, endpoint).get("k")
        with pytest.raises(NotFound):
            of_role(address, endpoint, ca_bundle=certificate).get("k")


def test_keys_that_soon_expire_are_asked_for_once_a_minute_and_used_while_the_service_is_away(
    of_role: Callable[..., S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Proxy(rule=lambda _: _keys(expire_in_s=120))
    with always(s3_error(404, "NoSuchKey")).running() as endpoint, service.running() as address:
        store = of_role(address, endpoint)
        for _ in range(5):
            with pytest.raises(NotFound):
                store.get("k")
        assert len(service.seen) == 1
        service.rule = lambda _: (403, {}, b"")
        monkeypatch.setattr(credentials, "HELD_S", 0.0)
        with pytest.raises(NotFound):
            store.get("k")
        assert len(service.seen) == 2
        store.close()


def test_a_program_that_prints_no_credentials_is_named(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile team]\ncredential_process = echo no document\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    store = opener(NO_STORE, credentials_dir=None)
    with pytest.raises(NoCredentials, match=r"no credentials .*JSONDecodeError"):
        store.get("k")
    store.close()


def test_a_program_that_does_not_end_is_not_waited_for(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_: AioSession) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(AioSession, "get_credentials", silent)
    monkeypatch.setattr(credentials, "FETCHED_WITHIN_S", 0.1)
    store = opener(NO_STORE, credentials_dir=None)
    with pytest.raises(StoreUnavailable, match=r"no credentials .*no answer within 0.1 s"):
        store.get("k")
    store.close()


@pytest.mark.parametrize("config", ["no section", "[profile team]\nendpoint_url = minio:9000\n", "[profile other]\n"])
def test_a_profile_that_cannot_be_used_is_a_setting(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(AccessRefused, match="correct CKPT_STORE or the AWS_ settings"):
        opener(None, region="us-east-1").get("k")


def test_a_profile_has_its_own_address_and_form_of_addresses(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = always(s3_error(404, "NoSuchKey"))
    with service.running() as endpoint:
        address = endpoint.replace("127.0.0.1", "localhost")
        (tmp_path / "config").write_text(f"[profile team]\nendpoint_url = {address}\ns3 =\n  addressing_style = path\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "team")
        store = opener(None, region="us-east-1")
        with pytest.raises(NotFound):
            store.get("k")
        store.close()
    assert service.seen[0].path.startswith(f"/{BUCKET}/")


def test_a_service_of_containers_that_refuses_says_why(opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("the token of a service account")
    reason = b'{"code": "AccessDenied", "message": "Unauthorized Exception! EKS does not have permissions to assume the role"}'
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with always((400, {"Content-Type": "application/json"}, reason)).running() as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service}/v1/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
        store = opener(NO_STORE, credentials_dir=None)
        with pytest.raises(NoCredentials, match="EKS does not have permissions to assume the role"):
            store.get("k")
        store.close()
