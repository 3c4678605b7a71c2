from __future__ import annotations

import json
import uuid
from pathlib import Path

import boto3
import pytest

from tests import servers

LIFECYCLE = Path(__file__).parents[2] / "deploy/s3/lifecycle.json"


@pytest.mark.parametrize("endpoint_name", ["moto_endpoint", pytest.param("rgw_endpoint", marks=pytest.mark.rgw)])
def test_a_store_takes_the_lifecycle_rules_as_they_are(request: pytest.FixtureRequest, endpoint_name: str) -> None:
    endpoint, bucket = request.getfixturevalue(endpoint_name), f"rule-{uuid.uuid4().hex[:12]}"
    servers.create_bucket(endpoint, bucket)
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
        region_name=servers.REGION,
    )
    rules = json.loads(LIFECYCLE.read_text())
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    taken = {rule["ID"]: rule for rule in client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]}
    assert {rule["Status"] for rule in taken.values()} == {"Enabled"}
    assert taken["abort-unfinished-checkpoint-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    replaced = taken["expire-what-was-overwritten-or-deleted"]
    assert replaced["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}
    assert replaced["Expiration"] == {"ExpiredObjectDeleteMarker": True}
    client.close()
