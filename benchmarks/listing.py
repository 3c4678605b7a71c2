"""``ls`` of a prefix with many checkpoints: ``python -m benchmarks.listing s3://bucket/prefix [--checkpoints 5000]``.

Writes the checkpoints that are missing, five small objects each, and prints wall and CPU time of the command. Endpoint and
credentials are those of the sidecar (``AWS_S3_ENDPOINT``, ``AWS_ACCESS_KEY_ID``). The objects stay, for the next measurement.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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
    given = parser.parse_args()
    store = open_anywhere(from_environment({**os.environ, "CKPT_STORE": given.store}))
    there = set(store.list_folders())
    wanted = {f"checkpoint-{10 * number}" for number in range(1, given.checkpoints + 1)}
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(partial(fill, store), sorted(wanted - there)))
    store.close()
    for _ in range(given.rounds):
        print(measured(given.store))


def fill(store: Store, name: str) -> None:
    """Write a small checkpoint, and commit it."""
    crc, entries = checksum.to_text(checksum.checksum(CONTENT)), []
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


if __name__ == "__main__":
    main()
