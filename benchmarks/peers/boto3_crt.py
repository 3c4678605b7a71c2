"""The C runtime below boto3 and the AWS command line, by s3transfer: boto3 itself cannot be told an HTTP endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.peers.program import Transfer, main


def up(transfer: Transfer) -> None:
    _run(transfer, lambda manager: [manager.upload(str(path), transfer.bucket, key) for path, key in transfer.uploads()])


def down(transfer: Transfer) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=transfer.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=transfer.bucket, Prefix=f"{transfer.prefix}/")
    keys = [found["Key"] for page in pages for found in page.get("Contents", [])]
    _run(transfer, lambda manager: [manager.download(transfer.bucket, key, str(transfer.target(key))) for key in keys])


def _run(transfer: Transfer, begin: Callable[[Any], list[Any]]) -> None:
    import botocore.session
    from s3transfer.crt import (
        BotocoreCRTCredentialsWrapper,
        BotocoreCRTRequestSerializer,
        CRTTransferManager,
        create_s3_crt_client,
    )

    session = botocore.session.Session()
    region = {"region_name": "us-east-1"}
    serializer = BotocoreCRTRequestSerializer(session, region | {"endpoint_url": transfer.endpoint})
    client = create_s3_crt_client(
        region["region_name"],
        crt_credentials_provider=BotocoreCRTCredentialsWrapper(session.get_credentials()).to_crt_credentials_provider(),
        use_ssl=transfer.endpoint.startswith("https:"),
        verify=os.environ.get("AWS_CA_BUNDLE"),
    )
    with CRTTransferManager(client, serializer) as manager:
        for future in begin(manager):
            future.result()


if __name__ == "__main__":
    main(up, down)
