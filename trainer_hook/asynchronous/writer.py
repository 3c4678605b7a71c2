"""The writer process: maps the memory of a snapshot and writes checkpoints from it, one job at a time.

A process of its own does not take the interpreter's lock from training, and training survives its crash. It dies with the
trainer; its checkpoint then stays without a marker. Each job is a pickled ``Job`` on its standard input, each answer a pickled
dictionary on its standard output; the file descriptor of the memory is an argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.jobs import Job, Memory
from trainer_hook.volume.space import described

NICENESS = 10
PARENT_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1


def answer(job: Job, mapped: mmap.mmap) -> dict[str, Any]:
    """Do one job.

    Returns:
        ``results``, one for each file; or ``error``.
    """
    try:
        memory = Memory(mapped)
        return {"results": [file.write(Path(job.folder), memory) for file in job.files]}
    except Exception as error:
        return {"error": described(error, Path(job.folder))}


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the trainer dies; poll for its death as well."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=poll, daemon=True).start()


def _lower_priority() -> None:
    """Give training the cores, and have the kernel kill this process first if memory runs out."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def main(fd: int, parent: int) -> None:
    """Write until the trainer closes the pipe or dies."""
    _die_with(parent)
    _lower_priority()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of a library is no answer
    import torch

    torch.set_num_threads(1)
    mapped: mmap.mmap | None = None
    with contextlib.suppress(EOFError):
        while True:
            job: Job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the parent process
            if mapped is None or len(mapped) < job.size_bytes:  # the memory has grown
                mapped = mmap.mmap(fd, job.size_bytes)
            pickle.dump(answer(job, mapped), answers)
            answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
