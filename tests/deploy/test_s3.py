"""The lifecycle rules, and the command that adds them to those of a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests import servers

S3 = Path(__file__).parents[2] / "deploy/s3"
OTHERS = [
    {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 14}},
    {"ID": "old", "Status": "Disabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 1}},
]
WITH_ABORT = pytest.mark.parametrize("server", ["moto", servers.ON_RGW])


class Bucket:
    """A new bucket, and the command run on it."""

    def __init__(self, endpoint: str) -> None:
        self.name = f"rule-{uuid.uuid4().hex[:12]}"
        servers.create_bucket(endpoint, self.name)
        access = {"AWS_ACCESS_KEY_ID": servers.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY}
        self._environ = {**os.environ, **access, "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": servers.REGION}
        given = {name.lower(): value for name, value in access.items()}
        self.client = boto3.client("s3", endpoint_url=endpoint, region_name=servers.REGION, **given)

    def merge(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(S3 / "merge-lifecycle"), *arguments]
        return subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=60, check=False)

    def put(self, rules: list[dict[str, Any]]) -> None:
        self.client.put_bucket_lifecycle_configuration(Bucket=self.name, LifecycleConfiguration={"Rules": rules})

    def rules(self) -> dict[str, dict[str, Any]]:
        found = self.client.get_bucket_lifecycle_configuration(Bucket=self.name)["Rules"]
        return {rule["ID"]: rule for rule in found}


@pytest.fixture
def bucket(request: pytest.FixtureRequest, server: str) -> Iterator[Bucket]:
    made = Bucket(request.getfixturevalue(f"{server}_endpoint"))
    yield made
    made.client.close()


@WITH_ABORT
def test_the_rules_are_added_to_those_that_are_there(bucket: Bucket) -> None:
    bucket.put(OTHERS)
    before = bucket.rules()
    for _ in range(2):
        done = bucket.merge(bucket.name)
        assert done.returncode == 0, done.stderr
    after = bucket.rules()
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"abort-unfinished-checkpoint-uploads", "expire-overwritten-or-deleted-checkpoints"}
    replaced = after["expire-overwritten-or-deleted-checkpoints"]
    assert replaced["NoncurrentVersionExpiration"]["NoncurrentDays"] == 30
    assert replaced["Expiration"] == {"ExpiredObjectDeleteMarker": True}
    aborted = after["abort-unfinished-checkpoint-uploads"]
    assert aborted["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert {rule["Filter"]["Prefix"] for rule in (replaced, aborted)} == {"runs/"}


@WITH_ABORT
def test_a_bucket_without_rules_gets_them_and_another_prefix_has_its_own(bucket: Bucket) -> None:
    assert bucket.merge(bucket.name).returncode == 0
    assert bucket.merge(bucket.name, "--prefix", "teams/a").returncode == 0
    prefixes = sorted(rule["Filter"]["Prefix"] for rule in bucket.rules().values())
    assert prefixes == ["runs/", "runs/", "teams/a/", "teams/a/"]


@pytest.mark.parametrize("server", [servers.ON_MINIO])
def test_a_store_that_aborts_unfinished_uploads_itself_gets_the_other_rule(bucket: Bucket) -> None:
    done = bucket.merge(bucket.name)
    assert done.returncode == 0, done.stderr
    assert "AbortIncompleteMultipartUpload" in done.stderr
    assert (
        set(bucket.rules())
        == {"expire-overwritten-or-deleted-checkpoints"}
        == {r["ID"] for r in json.loads(done.stdout)["Rules"]}
    )


@pytest.mark.parametrize("server", ["moto"])
def test_what_an_earlier_version_brought_for_the_whole_bucket_goes(bucket: Bucket) -> None:
    whole: dict[str, Any] = {"Status": "Enabled", "Filter": {"Prefix": ""}}
    bucket.put(
        [
            {
                "ID": "abort-unfinished-checkpoint-uploads",
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
                **whole,
            },
            {"ID": "expire-what-was-overwritten-or-deleted", "NoncurrentVersionExpiration": {"NoncurrentDays": 1}, **whole},
        ]
    )
    assert bucket.merge(bucket.name).returncode == 0
    assert [rule["Filter"]["Prefix"] for rule in bucket.rules().values()] == ["runs/", "runs/"]


@pytest.mark.parametrize("server", ["moto"])
@pytest.mark.slow
def test_nothing_is_written_when_the_present_rules_cannot_be_read_or_for_a_whole_bucket(bucket: Bucket) -> None:
    bucket.put(OTHERS)
    done = bucket.merge(f"{bucket.name}-other")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "NoSuchBucket" in done.stderr
    assert bucket.merge(bucket.name, "--prefix", "/").returncode == 2
    shown = bucket.merge(bucket.name, "--dry-run")
    assert [rule["ID"] for rule in json.loads(shown.stdout)["Rules"]][:2] == ["logs", "old"]
    assert set(bucket.rules()) == {"logs", "old"}
