"""Buckets that refuse requests without a header: Object Lock, policies that require an ACL or encryption, requester-pays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import servers
from tests.process.conftest import S3Server
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint
from tests.servers import Proxy, ProxyAnswer, Request, Rule

MIB = 1 << 20
FILES = {"weights.bin": bytes(range(256)) * (11 * MIB // 256), "small.json": b"{}", "empty": b""}
"""``weights.bin`` is sent in parts."""


def comparing(policy: Rule) -> Rule:
    """Return the policy on a store that compares the CRC64NVME, as AWS does."""
    compared = servers.ChecksumRule()

    def rule(request: Request) -> ProxyAnswer | None:
        return policy(request) or compared(request)

    return rule


LOCKED: Rule = servers.object_lock
POLICIES: list[tuple[Callable[[], Rule], dict[str, str]]] = [
    (lambda: comparing(LOCKED), {}),
    (lambda: LOCKED, {}),  # of a store that compares MD5s alone
    (lambda: comparing(servers.wants_acl), {"CKPT_S3_ACL": "bucket-owner-full-control"}),
    (lambda: comparing(servers.wants_encryption), {"CKPT_SSE": "AES256"}),
    (lambda: comparing(servers.requester_pays), {"CKPT_S3_REQUEST_PAYER": "requester"}),
]
ON_BOTO3 = pytest.param("moto", "boto3", marks=pytest.mark.slow)
ON_REAL_STORES = [
    pytest.param("rgw", "wire", marks=pytest.mark.rgw),
    pytest.param("minio", "wire", marks=pytest.mark.minio),
]
NAMES = ["object-lock", "object-lock-md5", "acl", "encryption", "requester-pays"]


@pytest.mark.parametrize(("rule", "settings"), POLICIES, ids=NAMES)
@pytest.mark.parametrize(("kind", "client"), [("moto", "wire"), ON_BOTO3, *ON_REAL_STORES])
def test_a_run_commits_and_resumes_in_a_bucket_that_wants_more_of_a_request(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    rule: Callable[[], Rule],
    settings: dict[str, str],
    kind: str,
    client: str,
) -> None:
    if kind != "moto" and "CKPT_SSE" in settings:
        pytest.skip("it encrypts with https or a KMS alone")
    with Proxy(request.getfixturevalue(f"{kind}_server").endpoint, rule()).running() as endpoint:
        server = S3Server(endpoint).settings(prefix=tmp_path.name)
        environ = server | settings | {"CKPT_PART_SIZE": "5MiB", "CKPT_S3_CLIENT": client}
        with sidecar(tmp_path / "volume", environ) as running:
            folder = running.ready().volume / "checkpoint-10"
            folder.mkdir()
            with (folder / "weights.bin").open("wb", buffering=0) as file:  # its beginning may be sent early
                file.write(FILES["weights.bin"])
            write_checkpoint(running.volume, "checkpoint-10", FILES)
            running.committed("checkpoint-10")
            assert running.terminate() == 0
        with sidecar(tmp_path / "other", environ) as resumed:
            assert resumed.up().resume()["checkpoint"] == "checkpoint-10"
            assert contents(resumed.volume / "checkpoint-10") == FILES


@pytest.mark.parametrize(("rule", "settings"), POLICIES[2:], ids=NAMES[2:])
def test_without_the_setting_that_a_bucket_wants_the_run_ends_and_names_it(
    moto_server: S3Server, tmp_path: Path, rule: Callable[[], Rule], settings: dict[str, str]
) -> None:
    ((name, value),) = settings.items()
    with (
        Proxy(moto_server.endpoint, rule()).running() as endpoint,
        sidecar(tmp_path / "volume", S3Server(endpoint).settings(prefix=tmp_path.name)) as running,
    ):
        assert running.wait() == 2
    assert f"{name}={value}" in running.log()
    if name != "CKPT_S3_REQUEST_PAYER":
        assert "grant s3:PutObject" not in running.log()


def test_what_is_sent_while_it_is_written_carries_a_checksum(moto_server: S3Server, tmp_path: Path) -> None:
    proxy = Proxy(moto_server.endpoint, comparing(LOCKED))
    with proxy.running() as endpoint:
        environ = S3Server(endpoint).settings(prefix=tmp_path.name) | {"CKPT_PART_SIZE": "5MiB"}
        with sidecar(tmp_path / "volume", environ) as running:
            folder = running.ready().volume / "checkpoint-10"
            folder.mkdir()
            with (folder / "weights.bin").open("wb", buffering=0) as file:

                def early() -> bool:
                    if any(request.is_part for request in proxy.seen if ".ckpt-probe" not in request.path):
                        return True
                    file.write(b"x" * MIB)
                    return False

                until(early, every_s=0.3, what=lambda: f"a part; log:\n{running.log()[-3000:]}")
            (folder / ".complete").touch()
            running.committed("checkpoint-10")
            assert running.terminate() == 0
