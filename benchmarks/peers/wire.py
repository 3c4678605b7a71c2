"""The physical limit: plain sockets in C. Signed URLs are made before, so that a store that asks for them takes part."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from benchmarks.native import built
from benchmarks.peers.program import Transfer, main

CONNECTIONS = 4
REQUEST_BYTES = 16 << 20


def up(transfer: Transfer) -> None:
    sign, lines = presigned(transfer, "put_object"), []
    for path, key in transfer.uploads():
        for offset, size in ranges(path.stat().st_size):
            lines.append(f"{sign(f'{key}.{offset}')} {offset} {size} {path}")
    _run("up", transfer, lines)


def down(transfer: Transfer) -> None:
    sign, lines = presigned(transfer, "get_object"), []
    for key, size_bytes in stored(transfer):
        target, path = sign(key), transfer.target(key)
        lines += [f"{target} {offset} {size} {path}" for offset, size in ranges(size_bytes)]
    _run("down", transfer, lines)


def ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield offsets and lengths of the requests for a number of bytes."""
    for offset in range(0, size_bytes, REQUEST_BYTES):
        yield offset, min(REQUEST_BYTES, size_bytes - offset)


def stored(transfer: Transfer) -> Iterator[tuple[str, int]]:
    """Yield the keys below the prefix, and their sizes."""
    for page in (
        _client(transfer).get_paginator("list_objects_v2").paginate(Bucket=transfer.bucket, Prefix=f"{transfer.prefix}/")
    ):
        for found in page.get("Contents", []):
            yield found["Key"], found["Size"]


def presigned(transfer: Transfer, operation: str) -> Callable[[str], str]:
    """Return what makes the target of a signed request from a key."""
    client = _client(transfer)

    def sign(key: str) -> str:
        url = urlsplit(client.generate_presigned_url(operation, Params={"Bucket": transfer.bucket, "Key": key}))
        return f"{url.path}?{url.query}"

    return sign


def _client(transfer: Transfer) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client("s3", endpoint_url=transfer.endpoint, config=Config(signature_version="s3v4"))


def _run(direction: str, transfer: Transfer, lines: list[str]) -> None:
    url = urlsplit(transfer.endpoint)
    trusted = [os.environ["AWS_CA_BUNDLE"]] if url.scheme == "https" else []
    command = [str(built("wirelimit")), direction, str(url.hostname), str(url.port), str(CONNECTIONS), *trusted]
    sys.exit(subprocess.run(command, input="\n".join(lines), text=True, check=False).returncode)


if __name__ == "__main__":
    main(up, down)
