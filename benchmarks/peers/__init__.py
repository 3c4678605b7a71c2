"""The tools that transfers are compared with. Each is a program: ``python -m benchmarks.peers.NAME up|down …``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """One of them."""

    module: str
    what: str
    measures_itself: bool = False
    """It says what its transfer cost; otherwise the cost of its start is subtracted."""


PEERS = {
    "wire": Peer("wire", "the physical limit: plain sockets, 4 connections", measures_itself=True),
    "loop": Peer("loop", "the limit of the language: a bare loop in Python with CRC64NVME, 2 threads", measures_itself=True),
    "s3fs": Peer("s3fs_files", "s3fs, put_file in 4 threads (the Kubeflow SDK's way), unsigned payload; get(recursive=True)"),
    "boto3": Peer("boto3_files", "boto3 upload_file, download_file, unsigned payload"),
    "boto3-crt": Peer("boto3_crt", "the C runtime below boto3 (s3transfer.crt), as it comes"),
    "obstore": Peer("obstore_files", "obstore, 16 MiB parts, unsigned payload; get as a stream"),
    "s3torch": Peer("s3torch", "s3torchconnector, S3Checkpoint.writer and reader"),
    "s5cmd": Peer("s5cmd", "s5cmd cp (it cannot leave out the hash over HTTP)"),
    "aws-cli": Peer("aws_cli", "aws s3 cp --recursive, unsigned payload"),
    "rclone": Peer("rclone", "rclone copy, unsigned payload"),
}
