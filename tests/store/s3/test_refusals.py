"""A store that answers and refuses: credentials, permissions, region and clock are named, with what to change."""

from __future__ import annotations

import email.utils
import time
from pathlib import Path

import pytest

from sidecar.errors import (
    AccessRefused,
)
from tests import servers
from tests.servers import Proxy, ProxyAnswer, Request, s3_error
from tests.store.conftest import _make_bucket
from tests.store.s3.conftest import Opener, always


def test_a_missing_bucket_is_named(opener: Opener, moto: str) -> None:
    with pytest.raises(AccessRefused, match=r"no-such-bucket.*NoSuchBucket.*create it"):
        opener(moto, bucket="no-such-bucket").probe()


def test_a_wrong_secret_key_is_named_and_not_shown(opener: Opener, real_endpoint: str, tmp_path: Path) -> None:
    _make_bucket(real_endpoint)
    secret = servers.write_credentials(tmp_path / "wrong", secret_key="my-wrong-secret")
    with pytest.raises(AccessRefused, match="AWS_SECRET_ACCESS_KEY") as caught:
        opener(real_endpoint, credentials_dir=secret).probe()
    assert "my-wrong-secret" not in str(caught.value)


def test_an_unknown_access_key_is_named(opener: Opener, real_endpoint: str, tmp_path: Path) -> None:
    _make_bucket(real_endpoint)
    secret = servers.write_credentials(tmp_path / "wrong", access_key="nobody")
    with pytest.raises(AccessRefused, match="AWS_ACCESS_KEY_ID"):
        opener(real_endpoint, credentials_dir=secret).probe()


def test_rotated_credentials_are_used_without_a_restart(opener: Opener, real_endpoint: str, tmp_path: Path) -> None:
    _make_bucket(real_endpoint)
    secret = servers.write_credentials(tmp_path / "secret", secret_key="expired")
    store = opener(real_endpoint, credentials_dir=secret)
    with pytest.raises(AccessRefused):
        store.put("k", b"")
    servers.write_credentials(secret)
    assert store.put("k", b"now").size_bytes == 3


def test_no_credentials_anywhere_are_named(opener: Opener, moto: str) -> None:
    with pytest.raises(AccessRefused, match=r"no credentials.*CKPT_CREDENTIALS_DIR"):
        opener(moto, credentials_dir=None).probe()


def test_a_denied_read_names_the_permission_that_an_absent_object_needs(opener: Opener) -> None:
    """With s3:ListBucket taken away, the sidecar asked for s3:GetObject, which its credentials had."""
    with (
        always(s3_error(403, "AccessDenied")).running() as endpoint,
        pytest.raises(AccessRefused, match=r"grant s3:GetObject, and s3:ListBucket, without which .* on the bucket"),
    ):
        opener(endpoint).get("k")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("AccessDenied", 403, "ListObjectsV2 was denied: grant s3:ListBucket"),
        ("ExpiredToken", 400, "expired: renew them"),
        ("InvalidToken", 400, "AWS_SESSION_TOKEN"),
        ("InvalidTokenId", 403, "AWS_SESSION_TOKEN"),  # of MinIO
        ("SignatureDoesNotMatch", 403, "changes the Host header or the path"),
        ("NotImplemented", 501, "does not implement"),
        ("UserSuspended", 403, "has suspended the user of this access key: have it enabled"),
        ("SomethingNew", 400, "SomethingNew: of a new kind"),
    ],
)
def test_a_refusal_says_what_to_change(opener: Opener, code: str, status: int, said: str) -> None:
    with (
        always(s3_error(status, code, message="of a new kind")).running() as endpoint,
        pytest.raises(AccessRefused, match=said) as caught,
    ):
        opener(endpoint).probe()
    assert not caught.value.transient
    assert servers.SECRET_KEY not in str(caught.value)


def test_a_refusal_without_a_message_names_the_next_step(opener: Opener) -> None:
    with (
        always(s3_error(400, "SomethingNew", message="")).running() as endpoint,  # as Ceph RGW answers
        pytest.raises(AccessRefused, match=r"SomethingNew: see the log of the store$"),
    ):
        opener(endpoint).probe()


@pytest.mark.parametrize("code", ["InvalidRequest", "NotImplemented"])  # of Ceph RGW without https, of MinIO without a KMS
def test_a_write_that_the_store_cannot_encrypt_names_the_setting(opener: Opener, moto: str, code: str) -> None:
    def rule(request: Request) -> ProxyAnswer | None:
        return s3_error(400, code, message="no KMS is configured") if request.method == "PUT" else None

    with (
        Proxy(moto, rule).running() as endpoint,
        pytest.raises(AccessRefused, match=rf"{code}: .*\(no KMS is configured\): if CKPT_SSE is set, unset it"),
    ):
        opener(endpoint, sse="AES256").probe()


def test_a_denied_write_names_its_permission(opener: Opener, moto: str) -> None:
    def rule(request: Request) -> ProxyAnswer | None:
        return s3_error(403, "AccessDenied") if request.method == "PUT" else None

    with Proxy(moto, rule).running() as endpoint, pytest.raises(AccessRefused, match="grant s3:PutObject"):
        opener(endpoint).probe()


def test_a_denied_deletion_names_its_permission(opener: Opener, moto: str) -> None:
    body = b"<DeleteResult><Error><Key>x/k</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"

    def rule(request: Request) -> ProxyAnswer | None:
        return (200, {"Content-Type": "application/xml"}, body) if "delete" in request.query else None

    with Proxy(moto, rule).running() as endpoint, pytest.raises(AccessRefused, match=r"x/k.*grant s3:DeleteObject"):
        opener(endpoint).probe()


def test_another_region_is_named(opener: Opener) -> None:
    answer = s3_error(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-central-1"})
    with always(answer).running() as endpoint, pytest.raises(AccessRefused, match=r"AWS_DEFAULT_REGION.*eu-central-1"):
        opener(endpoint).put("k", b"")


def test_a_wrong_clock_is_named_with_the_difference(opener: Opener) -> None:
    date = email.utils.formatdate(time.time() + 7200, usegmt=True)
    with (
        always(s3_error(403, "RequestTimeTooSkewed", Date=date)).running() as endpoint,
        pytest.raises(AccessRefused, match=r"clock is (7[12][0-9]{2}) s behind"),
    ):
        opener(endpoint).get("k")
