"""What an upload costs the client: CPU seconds per GiB, peak memory and wall time, beside boto3's own way in the same run.

    python -m benchmarks.transfer [--mib 512] [--rounds 3]

The server is a sink in a process of its own that reads and discards, so that the client is what is measured. Each client is a
fresh process. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 1 << 20
PART_BYTES = 16 * MIB
THREADS = 2


@dataclass(frozen=True)
class Cost:
    """Of one upload by one client."""

    cpu_s_per_gib: float
    peak_rss_mib: float
    wall_s: float


def ours(endpoint: str, path: Path) -> None:
    """Parts of the file through this project's store, CRC64NVME of every byte included."""
    from concurrent.futures import ThreadPoolExecutor

    from sidecar.core import checksum
    from sidecar.core.parts import part_ranges
    from sidecar.store.protocol import Part, Verification
    from sidecar.store.s3 import S3Options, S3Store
    from sidecar.store.slice import FileSlice, OpenGate

    store = S3Store(S3Options(bucket="bench", prefix="", endpoint_url=endpoint, region="us-east-1"))
    store.verification = Verification.OFF
    upload_id = store.begin_upload("file")
    fd = os.open(path, os.O_RDONLY)

    def send(numbered: tuple[int, tuple[int, int]]) -> tuple[Part, int]:
        number, (offset, length) = numbered
        body = FileSlice(fd, offset, length, gate=OpenGate(), name="file")
        return store.upload_part("file", upload_id, number, body), body.crc64nvme

    ranges = part_ranges(path.stat().st_size, part_bytes=PART_BYTES)
    with ThreadPoolExecutor(THREADS) as threads:
        done = list(threads.map(send, enumerate(ranges, 1)))
    crc = checksum.combined((crc, part.size_bytes) for part, crc in done)
    store.complete_upload("file", upload_id, [part for part, _ in done], crc64nvme=crc)


def boto3_default(endpoint: str, path: Path) -> None:
    """``upload_file`` as boto3 comes."""
    import boto3

    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").upload_file(str(path), "bench", "file")


def boto3_tuned(endpoint: str, path: Path) -> None:
    """``upload_file`` without payload hashing and checksums: no integrity, for comparison."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(request_checksum_calculation="when_required", s3={"payload_signing_enabled": False})
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
    transfer = TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=THREADS)
    client.upload_file(str(path), "bench", "file", Config=transfer)


CLIENTS: dict[str, Callable[[str, Path], None]] = {
    "checkpoint-sidecar": ours,
    "boto3 upload_file": boto3_default,
    "boto3 tuned, unverified": boto3_tuned,
}


def sink(listening: socket.socket) -> None:
    """Answer S3 uploads without looking at them."""
    import threading

    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_discard, args=(connection,), daemon=True).start()


def _discard(connection: socket.socket) -> None:
    buffer = bytearray(4 * MIB)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while head := _read_head(connection):
            request, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if value}
            if headers.get("expect", "").startswith("100"):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            left = int(headers.get("content-length", 0))
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            body = _body(request)
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "0"\r\nContent-Length: %d\r\n\r\n' % len(body) + body)


def _read_head(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return b""
        head += byte
    return head[:-4]


def _body(request: str) -> bytes:
    if request.startswith("POST") and "uploads" in request:
        return b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
    if request.startswith("POST"):
        return b'<CompleteMultipartUploadResult><ETag>"0"</ETag></CompleteMultipartUploadResult>'
    return b""


def measure(client: str, endpoint: str, path: Path) -> Cost:
    """Run a client in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.transfer", "--client", client, "--endpoint", endpoint, "--path", str(path)]
    environ = os.environ | {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def be_client(name: str, endpoint: str, path: Path) -> None:
    """Upload once, and print what it cost beyond starting up."""
    CLIENTS[name](endpoint, _small(path))  # imports, connections, sessions
    before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    CLIENTS[name](endpoint, path)
    after, wall_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began_s
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps(asdict(Cost(cpu_s * 1024 * MIB / path.stat().st_size, after.ru_maxrss / 1024, wall_s))))


def _small(path: Path) -> Path:
    small = path.with_name("small")
    small.write_bytes(bytes(20 * MIB))
    return small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", choices=CLIENTS)
    parser.add_argument("--endpoint")
    parser.add_argument("--path", type=Path)
    options = parser.parse_args()
    if options.client:
        be_client(options.client, options.endpoint, options.path)
        return
    listening = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(target=sink, args=(listening,), daemon=True)
    server.start()
    endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        with path.open("wb") as file:
            for _ in range(options.mib):
                file.write(os.urandom(MIB))
        rounds = [{name: measure(name, endpoint, path) for name in CLIENTS} for _ in range(options.rounds)]
    server.kill()
    report(rounds, options.mib)


def report(rounds: list[dict[str, Cost]], mib: int) -> None:
    """Print medians and their ratios to ours."""
    medians = {
        name: Cost(*(statistics.median(getattr(r[name], field) for r in rounds) for field in Cost.__dataclass_fields__))
        for name in CLIENTS
    }
    mine = medians["checkpoint-sidecar"]
    print(f"{mib} MiB over HTTP to a sink, {THREADS} threads, medians of {len(rounds)} interleaved rounds\n")
    print(f"{'client':<26}{'CPU s/GiB':>11}{'ratio':>7}{'RSS MiB':>9}{'ratio':>7}{'wall s':>8}{'ratio':>7}")
    for name, cost in medians.items():
        print(
            f"{name:<26}{cost.cpu_s_per_gib:>11.2f}{cost.cpu_s_per_gib / mine.cpu_s_per_gib:>7.1f}"
            f"{cost.peak_rss_mib:>9.0f}{cost.peak_rss_mib / mine.peak_rss_mib:>7.1f}"
            f"{cost.wall_s:>8.2f}{cost.wall_s / mine.wall_s:>7.1f}"
        )
    print(json.dumps({name: asdict(cost) for name, cost in medians.items()}))


if __name__ == "__main__":
    main()
