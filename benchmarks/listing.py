"""A prefix with many checkpoints: ``python -m benchmarks.listing s3://bucket/prefix [--checkpoints 5000] [--page]``.

Writes the checkpoints that are missing, five small objects each, and prints wall and CPU time of ``ls``; with ``--page`` also
how long a sidecar of this prefix takes to serve the live page. Endpoint and credentials are those of the sidecar
(``AWS_S3_ENDPOINT``, ``AWS_ACCESS_KEY_ID``). The objects stay, for the next measurement.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from sidecar.api.page import TYPES
from sidecar.core.commit.commit import commit_of, manifest_of
from sidecar.core.format import checksum, keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry, encode
from sidecar.daemon.settings import from_environment
from sidecar.store.opening import open_anywhere
from sidecar.store.protocol import Store
from trainer_hook.contract import Node, rfc3339, step_of

FILES, CONTENT = ("model.safetensors", "optimizer.pt", "trainer_state.json"), b"{}"
ATTEMPT = "benchmark"
THREADS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--checkpoints", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    store = open_anywhere(from_environment({**os.environ, "CKPT_STORE": given.store}))
    there = set(store.list_folders())
    wanted = {f"checkpoint-{10 * number}" for number in range(1, given.checkpoints + 1)}
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(fill, store), sorted(wanted - there)))
    store.close()
    for _ in range(given.rounds):
        print(measured(given.store))
    if given.page:
        print(page(given.store, given.rounds))


def fill(store: Store, name: str) -> None:
    """Write a small checkpoint, and commit it."""
    crc, entries = checksum.text_of(CONTENT), []
    for path in FILES:
        stored = store.put(keys.shared_file(name, path), CONTENT)
        entries.append(FileEntry(path=path, key=stored.key, size_bytes=len(CONTENT), crc64nvme=crc, etag=stored.etag))
    checkpoint = Finished(name, "v", step_of(name), None, ATTEMPT, Node(), time.time(), 1, (), {})
    manifest = manifest_of(checkpoint, entries)
    raw = encode(manifest)
    store.put(keys.manifest(name, ATTEMPT, Node()), raw)
    store.put(keys.commit(name), encode(commit_of([manifest], {0: raw}, committed_at=rfc3339(time.time()))))


def measured(store: str) -> str:
    """Return the time of one ``ls``, as text."""
    began_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "sidecar", "ls", store], capture_output=True, text=True, check=True)
    wall_s, after = time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{len(done.stdout.splitlines()) - 1} checkpoints: {wall_s:.2f} s wall, {cpu_s:.2f} s CPU"


def page(store: str, rounds: int) -> str:
    """Return how long the page's files and its first overview take, and until that has the store's checkpoints, as text."""
    with tempfile.TemporaryDirectory() as volume, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        mine = {
            "CKPT_STORE": store,
            "CKPT_DIR": volume,
            "CKPT_API_PORT": str(port),
            "CKPT_RESUME": "off",
            "CKPT_LOG": "console",
        }
        command = [sys.executable, "-m", "sidecar", "run"]
        running = subprocess.Popen(command, env=os.environ | mine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not _is_ready(port):
                time.sleep(0.1)
            looks = [viewed(port) for _ in range(rounds)]
        finally:
            running.terminate()
            running.wait()
    first = ", ".join(f"{first_s:.2f}" for first_s, _, _ in looks)
    return f"page: first overview after {first} s; the newest of {looks[0][2]} checkpoints after {looks[0][1]:.2f} s"


def viewed(port: int) -> tuple[float, float, int]:
    """Open the page as a browser does. Returns seconds until the first overview and until the store is read, and its size."""
    began_s = time.monotonic()
    for path in ("/", *(f"/page/{name}" for name in TYPES)):
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", path, headers={"accept": "text/html"})
            connection.getresponse().read()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/v1/live")
        first_s, lines = 0.0, connection.getresponse()
        for line in iter(lines.readline, b""):
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.monotonic() - began_s
            earlier = json.loads(line[6:])["earlier"]
            if earlier["state"] == "read":
                return first_s, time.monotonic() - began_s, int(earlier["folders"])
    raise RuntimeError("the stream ended")


def _is_ready(port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
    except OSError:
        return False


if __name__ == "__main__":
    main()
