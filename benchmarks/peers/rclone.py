"""rclone."""

import os

from benchmarks.peers.program import Transfer, become, main


def up(transfer: Transfer) -> None:
    _copy(transfer, str(transfer.folder), f"bench:{transfer.bucket}/{transfer.prefix}")


def down(transfer: Transfer) -> None:
    _copy(transfer, f"bench:{transfer.bucket}/{transfer.prefix}", str(transfer.folder))


def _copy(transfer: Transfer, source: str, target: str) -> None:
    remote = {"type": "s3", "provider": "Other", "env_auth": "true", "endpoint": transfer.endpoint, "list_version": "2"}
    remote |= {"use_unsigned_payload": "true", "disable_checksum": "true", "chunk_size": "16M"}
    settings = {f"RCLONE_CONFIG_BENCH_{name.upper()}": value for name, value in remote.items()}
    # Its own transport does not go with the SDK's variable for the same thing.
    settings |= {"RCLONE_CA_CERT": os.environ.get("AWS_CA_BUNDLE", ""), "AWS_CA_BUNDLE": ""}
    become("rclone", "copy", source, target, RCLONE_CONFIG=os.devnull, RCLONE_S3_NO_CHECK_BUCKET="true", **settings)


if __name__ == "__main__":
    main(up, down)
