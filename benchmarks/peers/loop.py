"""What the language costs: read, CRC64NVME, send, or receive, CRC64NVME, write, block by block in two threads, and no client.

Requests are signed before, as those of plain sockets are; answers are looked for, not read.
"""

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from awscrt.checksums import crc64nvme

from benchmarks.cost import NOT_INSTALLED, Cost
from benchmarks.peers.program import Transfer, main
from benchmarks.peers.wire import presigned, ranges, stored

THREADS = 2
BLOCK_BYTES = 512 << 10
Request = tuple[str, Path, int, int]
"""Target, file, offset and length."""


def up(transfer: Transfer) -> None:
    sign = presigned(transfer, "put_object")
    requests = [
        (sign(f"{key}.{offset}"), path, offset, size)
        for path, key in transfer.uploads()
        for offset, size in ranges(path.stat().st_size)
    ]
    _measured(transfer, requests, _send)


def down(transfer: Transfer) -> None:
    sign = presigned(transfer, "get_object")
    requests = [
        (sign(key), transfer.target(key), offset, size)
        for key, size_bytes in stored(transfer)
        for offset, size in ranges(size_bytes)
    ]
    for _, path, _, _ in requests:
        path.touch()
    _measured(transfer, requests, _receive)


def _send(connection: socket.socket, host: str, request: Request, buffer: memoryview) -> None:
    target, path, offset, left = request
    connection.sendall(f"PUT {target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {left}\r\n\r\n".encode())
    fd, crc = os.open(path, os.O_RDONLY), 0
    while left:
        count = os.preadv(fd, [buffer[: min(left, BLOCK_BYTES)]], offset)
        crc = crc64nvme(buffer[:count], crc)
        connection.sendall(buffer[:count])
        offset, left = offset + count, left - count
    os.close(fd)
    _head(connection, b" 200 ")


def _receive(connection: socket.socket, host: str, request: Request, buffer: memoryview) -> None:
    target, path, offset, left = request
    asked = f"bytes={offset}-{offset + left - 1}"
    connection.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nRange: {asked}\r\n\r\n".encode())
    block, fd, crc = _head(connection, b" 20"), os.open(path, os.O_WRONLY), 0
    while True:
        crc = crc64nvme(block, crc)
        offset, left = offset + os.pwrite(fd, block, offset), left - len(block)
        if not left:
            break
        count = connection.recv_into(buffer[: min(left, BLOCK_BYTES)], 0, socket.MSG_WAITALL)
        if not count:
            raise SystemExit("the server ended the connection early")
        block = buffer[:count]
    os.close(fd)


def _head(connection: socket.socket, wanted: bytes) -> memoryview:
    """Wait for an answer's head, and return what came behind it."""
    received = b""
    while (end := received.find(b"\r\n\r\n")) < 0:
        received += connection.recv(16 << 10)
    if wanted not in received[:16]:
        raise SystemExit(f"the server answered {received[:200]!r}")
    return memoryview(received[end + 4 :])


def _measured(
    transfer: Transfer, requests: list[Request], carry: Callable[[socket.socket, str, Request, memoryview], None]
) -> None:
    url = urlsplit(transfer.endpoint)
    if url.scheme != "http":
        print("over HTTP only")
        sys.exit(NOT_INSTALLED)
    arguments = url.hostname, url.port, _OneByOne(iter(requests)), carry
    threads = [threading.Thread(target=_carry_all, args=arguments) for _ in range(THREADS)]
    began_s, cpu_s = time.monotonic(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(asdict(Cost(time.process_time() - cpu_s, peak_rss_mib, time.monotonic() - began_s))))


class _OneByOne:
    """Hands requests out to threads."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._taking = threading.Lock()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        with self._taking:
            return next(self._requests)


def _carry_all(
    host: str,
    port: int,
    requests: Iterator[Request],
    carry: Callable[[socket.socket, str, Request, memoryview], None],
) -> None:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with closing(socket.create_connection((host, port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for request in requests:
            carry(connection, f"{host}:{port}", request, buffer)


if __name__ == "__main__":
    main(up, down)
