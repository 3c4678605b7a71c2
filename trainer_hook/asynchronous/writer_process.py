"""The writer process, from the trainer's side."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.jobs import Job

WRITER_BYTES = 384 << 20
"""Upper estimate of its own memory, with torch imported."""
KILL_TIMEOUT_S = 5.0


class WriterDied(RuntimeError):
    """The writer process ended, or could not be started."""


class NotWritten(RuntimeError):
    """The writer process could not write; the text is its reason."""


class Writer:
    """One running writer process."""

    def __init__(self, fd: int) -> None:
        """Start it; it imports torch while training runs. From the training thread: it dies with the thread that started it.

        Raises ``OSError``: it could not be started.
        """
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(dict.fromkeys([root, *filter(None, sys.path)]))
        environ = os.environ | {"PYTHONPATH": path, "CKPT_HOOK": "off", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # A launcher may signal the whole process tree or group, but only the trainer ends a save. Blocked already here, because
        # the process can be signalled before it runs code of its own; the mask survives exec.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer_hook.asynchronous.writer", str(fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environ,
                cwd="/",
                pass_fds=(fd,),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def do(self, job: Job) -> list[Any]:
        """Have a job done. Returns the result for each of its files.

        Raises:
            WriterDied: It is unknown how much was written.
            NotWritten: A part of it may have been written.
        """
        content = pickle.dumps(job)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)  # noqa: S301 - from the child process
        except (OSError, EOFError, pickle.UnpicklingError):
            self.close()
            raise WriterDied(f"the writer process ended with {self._process.returncode}") from None
        if "error" in answer:
            raise NotWritten(answer["error"])
        results: list[Any] = answer["results"]
        return results

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a write to a disk that does not answer
            self._process.wait(KILL_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
