"""The IAM policy against a server that enforces it: it is enough, and nothing in it is too much."""

from __future__ import annotations

import copy
import json
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from sidecar.errors import AccessRefused
from sidecar.store.s3.store import S3Options, S3Store
from sidecar.store.slice import FileSlice, OpenGate
from tests import servers

S3 = Path(__file__).parents[2] / "deploy/s3"
POLICY: dict[str, Any] = json.loads((S3 / "iam-policy.json").read_text())
WHOLE_LISTING: dict[str, Any] = json.loads((S3 / "iam-policy-whole-listing.json").read_text())
ACTIONS = sorted({action for statement in POLICY["Statement"] for action in statement["Action"]})
BUCKET = POLICY["Statement"][0]["Resource"].rpartition(":")[2]


def on_this_server(policy: dict[str, Any]) -> dict[str, Any]:
    """AWS asks for s3:DeleteObject on each object that DeleteObjects names; moto asks for it on the bucket."""
    *bucket, objects = policy["Statement"]
    deleting = [action for action in objects["Action"] if action == "s3:DeleteObject"]
    more = [{"Effect": "Allow", "Action": deleting, "Resource": bucket[0]["Resource"]}] if deleting else []
    return {**policy, "Statement": [*bucket, objects, *more]}


class Cloud:
    """A server whose only user may do what the policy says."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self._root = {"aws_access_key_id": servers.ACCESS_KEY, "aws_secret_access_key": servers.SECRET_KEY}
        servers.create_bucket(endpoint, BUCKET)
        iam = self._client("iam")
        iam.create_user(UserName="sidecar")
        iam.put_user_policy(UserName="sidecar", PolicyName="checkpoints", PolicyDocument=json.dumps(on_this_server(POLICY)))
        key = iam.create_access_key(UserName="sidecar")["AccessKey"]
        self.secret = servers.write_credentials(folder, access_key=key["AccessKeyId"], secret_key=key["SecretAccessKey"])
        iam.create_user(UserName="root")
        everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        iam.put_user_policy(UserName="root", PolicyName="all", PolicyDocument=json.dumps(everything))
        key = iam.create_access_key(UserName="root")["AccessKey"]
        self._root = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
        # From now on the server asks for permissions.
        headers = {"Content-Type": "text/plain"}
        reset = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", data=b"0", headers=headers, method="POST")
        with urllib.request.urlopen(reset) as answer:
            assert answer.status == 200

    def _client(self, service: str) -> Any:
        return boto3.client(service, endpoint_url=self.endpoint, region_name=servers.REGION, **self._root)

    def allow(self, policy: dict[str, Any]) -> None:
        self._client("iam").put_user_policy(
            UserName="sidecar", PolicyName="checkpoints", PolicyDocument=json.dumps(on_this_server(policy))
        )


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    with servers.moto() as endpoint:
        yield Cloud(endpoint, tmp_path_factory.mktemp("secret"))


def everything(endpoint: str, secret: Path, prefix: str) -> None:
    """Every kind of request that the sidecar makes of a store, once."""
    store = S3Store(S3Options(bucket=BUCKET, prefix=prefix, endpoint_url=endpoint, credentials_dir=secret))
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 1000)
        file.flush()
        body = FileSlice(file.fileno(), 0, 1000, gate=OpenGate(), name="weights.bin", with_md5=True)
        store.probe()
        store.put("run.json", b"{}")
        assert store.get("run.json") == b"{}"
        assert [found.key for found in store.list("")] == ["run.json"]
        upload = store.begin_upload("checkpoint-1/weights.bin")
        store.upload_part("checkpoint-1/weights.bin", upload, 1, body)
        assert [part.number for part in store.list_parts("checkpoint-1/weights.bin", upload)] == [1]
        assert [pending.key for pending in store.pending_uploads("")] == ["checkpoint-1/weights.bin"]
        store.abort_upload("checkpoint-1/weights.bin", upload)
        store.delete(["run.json"])
        assert list(store.list("")) == []
    store.close()


def test_it_is_enough_below_its_prefix_and_nothing_elsewhere(cloud: Cloud) -> None:
    everything(cloud.endpoint, cloud.secret, f"runs/{uuid.uuid4().hex}")
    with pytest.raises(AccessRefused):
        everything(cloud.endpoint, cloud.secret, f"other/{uuid.uuid4().hex}")


def test_only_listing_depends_on_the_prefix_because_aws_knows_it_nowhere_else() -> None:
    """Service Authorization Reference, Amazon S3: of these actions s3:prefix is a condition key of ListBucket alone."""
    conditioned = [statement["Action"] for statement in POLICY["Statement"] if "Condition" in statement]
    assert conditioned == [["s3:ListBucket"]]
    assert not any("Condition" in statement for statement in WHOLE_LISTING["Statement"])
    assert sorted(action for statement in WHOLE_LISTING["Statement"] for action in statement["Action"]) == ACTIONS
    assert POLICY["Statement"][-1] == WHOLE_LISTING["Statement"][-1]


def test_the_policy_with_a_listing_of_the_whole_bucket_is_enough_too(cloud: Cloud) -> None:
    cloud.allow(WHOLE_LISTING)
    try:
        everything(cloud.endpoint, cloud.secret, f"runs/{uuid.uuid4().hex}")
        with pytest.raises(AccessRefused):
            everything(cloud.endpoint, cloud.secret, f"other/{uuid.uuid4().hex}")
    finally:
        cloud.allow(POLICY)


@pytest.mark.parametrize("missing", ACTIONS)
def test_without_any_one_of_its_actions_the_store_refuses(cloud: Cloud, missing: str) -> None:
    less = copy.deepcopy(POLICY)
    for statement in less["Statement"]:
        statement["Action"] = [action for action in statement["Action"] if action != missing]
    less["Statement"] = [statement for statement in less["Statement"] if statement["Action"]]
    cloud.allow(less)
    try:
        with pytest.raises(AccessRefused):
            everything(cloud.endpoint, cloud.secret, f"runs/{uuid.uuid4().hex}")
    finally:
        cloud.allow(POLICY)


@pytest.mark.rgw
def test_it_is_enough_as_a_bucket_policy_of_ceph_rgw(rgw_endpoint: str, tmp_path: Path) -> None:
    """RGW wants s3:DeleteObject on the bucket itself for DeleteObjects, and the policy does not grant that."""
    servers.create_rgw_user("sidecar", secret_key="of-the-sidecar")
    servers.create_bucket(rgw_endpoint, BUCKET)
    whom = {"Principal": {"AWS": ["arn:aws:iam:::user/sidecar"]}}
    policy = WHOLE_LISTING | {"Statement": [statement | whom for statement in WHOLE_LISTING["Statement"]]}
    client = servers.s3_client(rgw_endpoint)
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
    try:
        secret = servers.write_credentials(tmp_path, access_key="sidecar", secret_key="of-the-sidecar")
        everything(rgw_endpoint, secret, f"runs/{uuid.uuid4().hex}")
        with pytest.raises(AccessRefused):
            everything(rgw_endpoint, secret, f"other/{uuid.uuid4().hex}")
    finally:
        client.delete_bucket_policy(Bucket=BUCKET)
        client.close()
