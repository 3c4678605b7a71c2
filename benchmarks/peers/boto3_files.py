"""boto3's own transfers, file after file."""

from typing import Any

from benchmarks.peers.program import Transfer, main


def up(transfer: Transfer, **config: Any) -> None:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=transfer.endpoint)
    for path, key in transfer.uploads():
        client.upload_file(str(path), transfer.bucket, key, Config=TransferConfig(**config))


def down(transfer: Transfer, **config: Any) -> None:
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3", endpoint_url=transfer.endpoint)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=transfer.bucket, Prefix=f"{transfer.prefix}/"):
        for found in page.get("Contents", []):
            target = str(transfer.target(found["Key"]))
            client.download_file(transfer.bucket, found["Key"], target, Config=TransferConfig(**config))


if __name__ == "__main__":
    main(up, down)
