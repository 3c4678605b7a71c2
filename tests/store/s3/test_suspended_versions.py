"""A bucket whose versioning was suspended: Ceph RGW takes a deleted object for one that exists."""

from __future__ import annotations

import uuid
from pathlib import Path

from sidecar.store.s3.store import S3Options, S3Store
from tests import servers


def test_an_object_that_was_deleted_can_be_written_again(real_endpoint: str, credentials_dir: Path) -> None:
    bucket = f"suspended-{uuid.uuid4().hex}"
    client = servers.s3_client(real_endpoint)
    client.create_bucket(Bucket=bucket)
    for status in ("Enabled", "Suspended"):
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
    client.close()
    store = S3Store(S3Options(bucket=bucket, prefix="run", endpoint_url=real_endpoint, credentials_dir=credentials_dir))
    store.probe()
    for content in (b"first", b"second"):
        store.put("checkpoint-1/.complete", content, only_if_absent=True)
        assert store.get("checkpoint-1/.complete") == content
        store.delete(["checkpoint-1/.complete"])
    store.close()
