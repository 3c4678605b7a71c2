"""Asynchronous ``torch.distributed.checkpoint``: all ranks plan the save at once, the writer process of each writes its part.

``dcp.save`` runs unchanged, in a thread. Its storage writer hands over this rank's items, and waits until they are written.
Then the ranks exchange the positions of all items, or their errors, and rank 0 writes the metadata.
"""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter

from trainer_hook.asynchronous.deferring import DEVICES, Deferred, DeferredFile, RankFailed
from trainer_hook.asynchronous.jobs import ShardsJob, SnapshotLayout

_MAX_REASON_CHARS = 500


def save(state: Mapping[str, Any], folder: Path, group: Any, deferred: Deferred | None = None) -> None:
    """Save sharded state by name. Collective.

    ``deferred`` takes this rank's part; with ``None`` it is written at once. Ranks may differ in it. ``group``: of all ranks,
    for CPU tensors; nothing else may use it until a deferred save has ended.

    Raises ``RankFailed``: a rank could not plan or write its part.
    """
    if deferred is None:
        try:
            _save(state, group, FileSystemWriter(folder, sync_files=False))
        except CheckpointException as error:  # no Exception
            raise RankFailed(reasons(error)) from error
        return
    shards = Shards(folder, folder.relative_to(deferred.folder).as_posix())
    shards.plan(state, group)
    if shards.can_wait:
        deferred.files.append(shards)
    else:
        shards.write()


def _save(state: Mapping[str, Any], group: Any, writer: Any) -> None:
    dcp.save(
        dict(state),
        storage_writer=writer,  # without fsync: only the marker needs it
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        process_group=group,
        **alone_as_told(dcp.save),
    )


def alone_as_told(call: Any) -> dict[str, bool]:
    """Return ``no_dist`` for a call of DCP. The oldest versions have no such argument, and the same rule inside."""
    is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    return {"no_dist": is_alone} if "no_dist" in inspect.signature(call).parameters else {}


class Shards(DeferredFile):
    """One rank's part of a save."""

    def __init__(self, folder: Path, path: str) -> None:
        self._folder = folder
        self._path = path
        self._reached, self._answered = threading.Event(), threading.Event()
        self._plan: Any = None
        self._contents: list[Any] = []
        self._write: Callable[[], Any] = list
        self._answer: Callable[[], Any] = list
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def plan(self, state: Mapping[str, Any], group: Any) -> None:
        """Agree with all ranks on who writes what, and return before anything is written.

        Raises ``RankFailed``: a rank could not.
        """
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # a new thread has the first device
                _save(state, group, _HandsOver(self._folder, self._wait_for_answer))
            except BaseException as error:
                self._failure = error
            finally:
                self._reached.set()

        self._thread = threading.Thread(target=run, name="checkpoint-shards", daemon=True)
        self._thread.start()
        self._reached.wait()
        if self._plan is None:
            self._end()

    def _wait_for_answer(self, plan: Any, planner: Any, write: Callable[[], Any]) -> Any:
        resolved = (planner.resolve_data(item) for item in plan.items)
        self._plan = plan
        self._contents = [r.detach() if isinstance(r, torch.Tensor) else bytes(r.getbuffer()) for r in resolved]
        self._write = write
        self._reached.set()
        self._answered.wait()
        return self._answer()

    @property
    def can_wait(self) -> bool:
        """Whether all of it can be copied: bytes, and plain tensors on known devices."""
        return all(isinstance(c, bytes) or (type(c) is torch.Tensor and c.device.type in DEVICES) for c in self._contents)

    def job(self, layout: SnapshotLayout) -> ShardsJob:
        """As ``DeferredFile.job``."""
        contents = [layout.of(c) if isinstance(c, bytes) else layout.of_tensor(c) for c in self._contents]
        return ShardsJob(self._path, pickle.dumps(self._plan), contents)

    def write(self) -> None:
        """As ``DeferredFile.write``."""
        self._answer_with(self._write)

    def written(self, result: Any) -> None:
        """As ``DeferredFile.written``."""
        self._answer_with(lambda: pickle.loads(result))  # noqa: S301 - from the child process

    def give_up(self, error: Exception) -> None:
        """As ``DeferredFile.give_up``: the other ranks are told."""

        def fail() -> Any:
            raise error

        try:
            self._answer_with(fail)
        except RankFailed:
            return

    def _answer_with(self, answer: Callable[[], Any]) -> None:
        self._contents = []
        self._answer = answer
        self._answered.set()
        self._end()

    def _end(self) -> None:
        assert self._thread is not None
        self._thread.join()
        if self._failure is not None:
            raise RankFailed(reasons(self._failure)) from self._failure


class _HandsOver(FileSystemWriter):  # type: ignore[misc]
    """Leaves to ``then`` when, and by which process, the items are written."""

    def __init__(self, folder: Path, then: Callable[[Any, Any, Callable[[], Any]], Any]) -> None:
        super().__init__(folder, sync_files=False)
        self._then = then

    def write_data(self, plan: Any, planner: Any) -> Any:
        write = super().write_data
        results = self._then(plan, planner, lambda: write(plan, planner).value())
        done: Any = torch.futures.Future()
        done.set_result(results)
        return done


def reasons(error: BaseException) -> str:
    """Return in one line which ranks failed, and why."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    told = "; ".join(f"rank {rank}: {type(what).__name__}: {what}" for rank, (what, _) in sorted(failures.items()))
    return (told or f"{type(error).__name__}: {error}")[:_MAX_REASON_CHARS]
