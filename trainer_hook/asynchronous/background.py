"""Asynchronous saves: training is held while a snapshot is taken, and a process of its own writes it. One at a time.

Knows no trainer: :meth:`Background.capture` runs any function that saves a checkpoint into a folder, :meth:`Background.start`
has the snapshot written and calls back, from a thread that waits for the process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous import host_memory
from trainer_hook.asynchronous.deferring import Deferred, RankFailed, deferring
from trainer_hook.asynchronous.host_buffer import HostBuffer
from trainer_hook.asynchronous.jobs import Job, SnapshotLayout
from trainer_hook.asynchronous.snapshot import Copier, TornSnapshot, steps_alone
from trainer_hook.asynchronous.writer_process import KILL_TIMEOUT_S, NotWritten, Writer
from trainer_hook.process.log import info, warn
from trainer_hook.volume.space import is_of_full_volume

MAX_CONSECUTIVE_FAILURES = 2
"""After this number of failures in a row, saves block training."""
SAVE_TIME_FACTOR = 1.25
SAVE_TIME_MARGIN_S = 1.0


def fits(*, expected_s: float, left_s: float) -> bool:
    """Whether a save can end in time: ``expected_s`` as the last one took, ``left_s`` until the process is killed."""
    return expected_s * SAVE_TIME_FACTOR + SAVE_TIME_MARGIN_S <= left_s


@dataclass(frozen=True, slots=True)
class Captured:
    """A snapshot. Small files are on disk already."""

    files: list[Any]
    """Jobs of the writer process; empty: there is no large file."""
    arrived: Callable[[], None]
    """Returns when the copy into host memory is complete, or raises."""
    deferred: Deferred

    @property
    def paths(self) -> list[str]:
        """Of the files that the writer process is to write, relative to the checkpoint."""
        return [str(file.path) for file in self.files]

    def give_up(self, error: Exception | None = None) -> None:
        """Release the optimizer and the other ranks, which wait for this snapshot: it will not be written."""
        with contextlib.suppress(Exception):
            self.arrived()
        self.deferred.give_up(error or RuntimeError("the save was given up"))

    def written(self, results: list[Any]) -> None:
        """Finish after the writer process. Raises ``RankFailed``: another rank could not write its part."""
        for file, result in zip(self.deferred.files, results, strict=True):
            file.written(result)


class Background:
    """Writes one checkpoint at a time while training runs. All methods are for the training thread."""

    def __init__(self, ranks: int = 1) -> None:
        """``ranks``: as for ``memory_shortage``."""
        self._ranks = ranks
        self._buffer: HostBuffer | None = None
        self._writer: Writer | None = None
        self._copier: Copier | None = None
        self._preparing: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._torn = False
        self._said: set[str] = set()

    def prepare(self, size_bytes: int, *, device: Any = None) -> None:
        """Allocate memory and start the process while training runs, so that the first save takes no longer than others.

        ``size_bytes``: estimated size of a snapshot. ``device``: accelerator from which it is copied; ``None``: from the CPU.
        """
        if self._memory_shortage(size_bytes) is None and (buffer := self._started()) is not None:
            thread = threading.Thread(target=buffer.prepare, args=(size_bytes, device), name="checkpoint-memory", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread available: the first save reserves the memory
                thread.start()
                self._preparing = thread

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """Of the writer process; ``None``: there is none."""
        return self._writer.pid if self._writer is not None else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written and the callback has returned. Returns false on timeout."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def capture(self, folder: Path, save: Callable[[], None], *, optimizer: Any = None) -> Captured | None:
        """Run a save, but take a snapshot of its large files instead of writing them. Waits for a save in flight.

        Args:
            folder: Of the checkpoint. Files elsewhere are written at once.
            save: Writes the checkpoint, with ``torch.save`` and ``safetensors.torch.save_file``.
            optimizer: Only its ``step()`` changes the parameters; it will wait for the copy. ``None``: other code may change
                them, and the copy is complete on return.

        Returns:
            The snapshot for :meth:`start`; ``None``: no snapshot was possible and all is written.

        Raises ``Exception``: any error of ``save``.
        """
        self.wait()
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            save()
            return None
        with deferring(folder) as deferred, deferred.given_up_on_error():
            save()
        if not deferred.files:
            return Captured([], lambda: None, deferred)
        with deferred.given_up_on_error():
            captured = self._snapshot(deferred, optimizer)
        if captured is None:
            deferred.write()
        return captured

    def start(self, captured: Captured, folder: Path, then: Callable[[Exception | None], None]) -> None:
        """Have a snapshot written below ``folder``; then call ``then`` with the error, or ``None``."""
        job = Job(str(folder), self._buffer.size_bytes if self._buffer else 0, captured.files)

        def work() -> None:
            error: Exception | None = None
            try:
                if captured.files:
                    self._write(captured, job)
                self._failures = 0
            except Exception as what:
                error = what
                self._count(what)
            try:
                then(error)
            except Exception as what:
                warn(f"{folder.name} was written but not finished ({type(what).__name__}: {what})")

        thread = threading.Thread(target=work, name="checkpoint-writer", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # no thread available
            work()

    def _write(self, captured: Captured, job: Job) -> None:
        assert self._writer is not None
        try:
            captured.arrived()
            results = self._writer.do(job)
        except Exception as error:
            captured.give_up(error)
            raise
        captured.written(results)

    def close(self) -> None:
        """End the process and free the memory. A save in flight is lost; see :meth:`wait`."""
        if self._preparing is not None:
            self._preparing.join()
        if self._writer is not None:
            self._writer.close()
        if self.wait(KILL_TIMEOUT_S) and self._buffer is not None:
            self._buffer.close()
        self._buffer = self._writer = self._copier = self._preparing = None

    def _count(self, error: Exception) -> None:
        if isinstance(error, TornSnapshot):
            self._torn = True  # later snapshots do not overlap with training
            return
        if isinstance(error, RankFailed) or (isinstance(error, NotWritten) and is_of_full_volume(str(error))):
            return  # the failure of another rank, or one that a blocking save would have, too
        self._failures += 1
        if self._failures == MAX_CONSECUTIVE_FAILURES:
            warn(f"{self._failures} asynchronous saves failed in a row: from now on saves block training")

    def _memory_shortage(self, size_bytes: int) -> str | None:
        held = self._buffer.size_bytes if self._buffer else 0
        return host_memory.memory_shortage(size_bytes, held_bytes=held, limit=host_memory.available(), ranks=self._ranks)

    def _snapshot(self, deferred: Deferred, optimizer: Any) -> Captured | None:
        layout = SnapshotLayout()
        files = [file.job(layout) for file in deferred.files]
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        reason = self._memory_shortage(layout.size_bytes)
        if reason is None and (buffer := self._started()) is not None:
            overlaps = not self._torn and optimizer is not None and steps_alone(optimizer)
            try:
                buffer.reserve(layout.size_bytes)
                assert self._copier is not None
                arrived = self._copier.copy(layout, optimizer if overlaps else None)
                return Captured(files, arrived, deferred)
            except (OSError, RuntimeError, ValueError) as error:
                self._count(error)
                reason = f"{type(error).__name__}: {error}"
        self._say_once(f"this save blocks training: {reason}" if reason else "this save blocks training")
        return None

    def _started(self) -> HostBuffer | None:
        """Return the memory, with a running writer process; ``None``: not possible."""
        try:
            if self._buffer is None:
                self._buffer = HostBuffer()
                self._copier = Copier(self._buffer)
            if self._writer is None or not self._writer.alive():
                self._writer = Writer(self._buffer.fd)
        except (OSError, AttributeError, ValueError) as error:
            self._count(error)
            self._say_once(f"no writer process could be started: {error}")
            return None
        return self._buffer

    def _say_once(self, text: str) -> None:
        if text.split(":")[0] not in self._said:
            self._said.add(text.split(":")[0])
            info(text)
