"""boto3's own transfers without hash and checksum of the payload: four files at once, parts of 16 MiB."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.program import UNSIGNED, Transfer, main

FILES_AT_ONCE = 4
FASTEST: dict[str, Any] = {"multipart_chunksize": 16 << 20, "max_concurrency": 4}


def up(transfer: Transfer) -> None:
    client, config = _client(transfer)

    def put(file: tuple[Path, str]) -> None:
        client.upload_file(str(file[0]), transfer.bucket, file[1], Config=config)

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        list(threads.map(put, transfer.uploads()))


def down(transfer: Transfer) -> None:
    client, config = _client(transfer)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=transfer.bucket, Prefix=f"{transfer.prefix}/")
    keys = [found["Key"] for page in pages for found in page.get("Contents", [])]

    def fetch(key: str) -> None:
        client.download_file(transfer.bucket, key, str(transfer.target(key)), Config=config)

    with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
        list(threads.map(fetch, keys))


def _client(transfer: Transfer) -> tuple[Any, Any]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    return boto3.client("s3", endpoint_url=transfer.endpoint, config=Config(**UNSIGNED)), TransferConfig(**FASTEST)


if __name__ == "__main__":
    main(up, down)
