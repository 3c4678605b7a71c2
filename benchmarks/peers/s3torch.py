"""s3torchconnector: the writer and reader that ``torch.save`` and ``torch.load`` are given, file after file."""

import shutil
from typing import Any

from benchmarks.peers.program import Transfer, main

BLOCK_BYTES = 1 << 20


def up(transfer: Transfer) -> None:
    checkpoint = _checkpoint(transfer)
    for path, key in transfer.uploads():
        with path.open("rb") as source, checkpoint.writer(f"s3://{transfer.bucket}/{key}") as target:
            shutil.copyfileobj(source, target, BLOCK_BYTES)


def down(transfer: Transfer) -> None:
    from s3torchconnector import S3MapDataset

    checkpoint, where = _checkpoint(transfer), {"region": "us-east-1", "endpoint": transfer.endpoint}
    for found in S3MapDataset.from_prefix(f"{transfer.url}/", **where, s3client_config=_config()):
        with (
            checkpoint.reader(f"s3://{transfer.bucket}/{found.key}") as source,
            transfer.target(found.key).open("wb") as target,
        ):
            shutil.copyfileobj(source, target, BLOCK_BYTES)


def _checkpoint(transfer: Transfer) -> Any:
    from s3torchconnector import S3Checkpoint

    return S3Checkpoint(region="us-east-1", endpoint=transfer.endpoint, s3client_config=_config())


def _config() -> Any:
    from s3torchconnector import S3ClientConfig

    return S3ClientConfig(force_path_style=True)


if __name__ == "__main__":
    main(up, down)
