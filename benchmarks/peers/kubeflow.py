"""The Kubeflow SDK's scheme of S3 checkpointing, by its published behaviour, as a training process of its own.

    python -m benchmarks.peers.kubeflow ENDPOINT BUCKET KEYPREFIX SOURCE SCRATCH SAVE_MB_PER_S

A thread of the training process uploads: newest first, but what it has begun it finishes; files by s3fs ``put_file`` in four
threads; a checkpoint counts once its "incomplete" object is removed. Nothing is sent before the save has ended. On SIGTERM the
main thread saves, hands the checkpoint over and waits. Prints ``ready``; a line ``N`` on stdin begins N older uploads; at the
end prints the time at which the last checkpoint counted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.program import Transfer
from benchmarks.work import save_paced

THREADS = 4


class UploadStack:
    """The thread and its stack."""

    def __init__(self, files: Any) -> None:
        self._files = files
        self._stack: list[Transfer] = []
        self._changed = threading.Condition()
        self._through: set[str] = set()
        threading.Thread(target=self._run, daemon=True).start()

    def push(self, transfer: Transfer) -> None:
        """Take over a finished checkpoint."""
        with self._changed:
            self._stack.append(transfer)
            self._changed.notify_all()

    def wait_for(self, transfer: Transfer) -> None:
        """Return when a checkpoint counts."""
        with self._changed:
            self._changed.wait_for(lambda: transfer.prefix in self._through)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._stack))
                transfer = self._stack.pop()
            self._upload(transfer)
            with self._changed:
                self._through.add(transfer.prefix)
                self._changed.notify_all()

    def _upload(self, transfer: Transfer) -> None:
        incomplete = f"{transfer.bucket}/{transfer.prefix}/checkpoint-is-incomplete.txt.0"
        self._files.pipe_file(incomplete, b"incomplete")
        with ThreadPoolExecutor(THREADS) as threads:
            pairs = transfer.uploads()
            list(threads.map(lambda pair: self._files.put_file(str(pair[0]), f"{transfer.bucket}/{pair[1]}"), pairs))
        self._files.rm_file(incomplete)


def main(endpoint: str, bucket: str, prefix: str, source: Path, scratch: Path, save_mb_per_s: float) -> None:
    """Be the training process."""
    import s3fs

    uploads = UploadStack(s3fs.S3FileSystem(endpoint_url=endpoint))
    warm = scratch / "warm"
    warm.mkdir()
    (warm / "file").write_bytes(b"x")
    first = Transfer(endpoint, bucket, f"{prefix}/warm", warm)
    uploads.push(first)
    uploads.wait_for(first)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    print("ready", flush=True)
    for number in range(int(sys.stdin.readline())):
        uploads.push(Transfer(endpoint, bucket, f"{prefix}/checkpoint-{number}", source))
    told.wait()
    last = Transfer(endpoint, bucket, f"{prefix}/checkpoint-99", scratch / "checkpoint-99")
    save_paced(source, last.folder, mb_per_s=save_mb_per_s)
    uploads.push(last)
    uploads.wait_for(last)
    print(time.time(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    endpoint, bucket, prefix, source, scratch, rate = sys.argv[1:7]
    main(endpoint, bucket, prefix, Path(source), Path(scratch), float(rate))
