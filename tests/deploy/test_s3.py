from __future__ import annotations

import json
import uuid
from pathlib import Path

import boto3
import pytest

from tests import servers

LIFECYCLE = Path(__file__).parents[2] / "deploy/s3/lifecycle.json"


@pytest.mark.parametrize("endpoint_name", ["moto_endpoint", pytest.param("rgw_endpoint", marks=pytest.mark.rgw)])
def test_a_store_takes_the_lifecycle_rule_as_it_is(request: pytest.FixtureRequest, endpoint_name: str) -> None:
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
    [taken] = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert taken["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert taken["Status"] == "Enabled"
    client.close()
