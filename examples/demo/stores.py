"""The demo's object store: an S3 server of its own in this machine's memory, or a folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from examples.demo.pod import free_port
from sidecar.daemon.settings import from_environment
from sidecar.errors import ConfigurationError
from sidecar.store.opening import open_from

BUCKET = "demo-bucket"


@contextlib.contextmanager
def store(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yield the settings of a store that lives as long as the context.

    Args:
        kind: ``s3`` or ``file``.
        folder: Where a ``file`` store lies.

    Raises:
        ConfigurationError: The S3 server did not start.
    """
    if kind == "file":
        yield {"CKPT_STORE": f"file://{folder / 'store'}"}
        return
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    settings = {
        "CKPT_STORE": f"s3://{BUCKET}/run-1",
        "AWS_S3_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        _create_bucket(settings)
        yield settings
    finally:
        server.terminate()
        server.wait()


def _create_bucket(settings: dict[str, str]) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError

    client = boto3.client(
        "s3",
        endpoint_url=settings["AWS_S3_ENDPOINT"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        region_name=settings["AWS_DEFAULT_REGION"],
    )
    for _ in range(60):
        try:
            client.create_bucket(Bucket=BUCKET)
        except BotoCoreError:
            time.sleep(0.5)
        else:
            return
    raise ConfigurationError("the demo's S3 server did not start: run 'python -m moto.server' to see why, or take STORE=file")


def keys(settings: dict[str, str]) -> list[str]:
    """Return the keys of all objects in the store.

    Raises:
        StoreError: The store does not answer.
    """
    os.environ.update(settings)  # botocore reads its credentials there
    opened = open_from(from_environment(settings))
    try:
        return [stored.key for stored in opened.list("")]
    finally:
        opened.close()
