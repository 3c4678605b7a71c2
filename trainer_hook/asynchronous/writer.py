"""The writer process: maps the memory of a snapshot and writes checkpoints from it, one job at a time.

A process of its own does not take the interpreter's lock from training, and training survives its crash. It dies with the
trainer; its checkpoint then stays without a marker. Each job is one line of JSON on its standard input, each answer one line
on its standard output; the file descriptor of the memory is an argument.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import functools
import io
import json
import mmap
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NICENESS = 10
PARENT_POLL_S = 0.2
_PR_SET_PDEATHSIG = 1
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of the memory, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in the memory."""

    storage: Extent
    dtype: str
    offset: int
    """In elements, as the strides."""
    shape: list[int]
    stride: list[int]


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """A file as ``torch.save`` writes it."""

    path: str
    records: list[tuple[str, Extent]]
    options: list[Any]
    """Further arguments of ``PyTorchFileWriter``, as they are set in the trainer."""
    kind: str = "archive"


@dataclass(frozen=True, slots=True)
class TensorsJob:
    """A file as ``safetensors.torch.save_file`` writes it."""

    path: str
    tensors: list[tuple[str, View]]
    metadata: Mapping[str, str] | None
    kind: str = "tensors"


@dataclass(frozen=True, slots=True)
class ShardsJob:
    """What ``write_data`` of a ``FileSystemWriter`` of ``torch.distributed.checkpoint`` writes."""

    path: str
    """Of the folder."""
    plan: str
    """A ``SavePlan``, ``packed``."""
    contents: list[Extent | View]
    """In the order of its items: bytes, or a tensor."""
    kind: str = "shards"


@dataclass(frozen=True, slots=True)
class Job:
    """The files of one checkpoint, whose content is in the memory."""

    folder: str
    size_bytes: int
    """Of the memory."""
    files: list[ArchiveJob | TensorsJob | ShardsJob]

    def encode(self) -> bytes:
        """Return the line of the protocol."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Memory:
    """The memory of the trainer's snapshot. It may have grown since the last job."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None

    def storage(self, offset: int, length: int, *, size_bytes: int) -> Any:
        """Return a part of it as an ``UntypedStorage`` of exactly that length."""
        import torch

        if length == 0:
            return torch.UntypedStorage(0)
        return torch.frombuffer(self._mapped(size_bytes), dtype=torch.uint8, count=length, offset=offset).untyped_storage()

    def bytes(self, offset: int, length: int, *, size_bytes: int) -> bytes:
        """Return a copy of a part of it."""
        return self._mapped(size_bytes)[offset : offset + length] if length else b""

    def _mapped(self, size_bytes: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size_bytes:
            self._map = mmap.mmap(self._fd, size_bytes)
        return self._map


def packed(thing: Any) -> str:
    """Return an object as text, for the trainer and this process only."""
    return base64.b64encode(pickle.dumps(thing)).decode()


def unpacked(text: str) -> Any:
    """Return the object of a ``packed`` text."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - from the parent or child process


def write_archive(memory: Memory, job: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Write the file of ``torch.save``.

    Source: ``torch.serialization.save``, which makes these calls on the archive.
    """
    import torch

    archive = torch._C.PyTorchFileWriter(str(Path(job["folder"], file["path"])), *file["options"])
    try:
        for name, extent in file["records"]:
            storage = memory.storage(extent["offset"], extent["length"], size_bytes=job["size_bytes"])
            archive.write_record(name, storage, extent["length"])
    finally:
        archive.write_end_of_file()  # also after an error: else torch ends the process when it collects the archive


def write_tensors(memory: Memory, job: Mapping[str, Any], file: Mapping[str, Any]) -> None:
    """Write the file of ``safetensors.torch.save_file``. Tied tensors share memory here, too."""
    from safetensors.torch import save_file

    tensor_of = _tensors(memory, job)
    tensors = {name: tensor_of(view) for name, view in file["tensors"]}
    save_file(tensors, str(Path(job["folder"], file["path"])), file["metadata"])


def write_shards(memory: Memory, job: Mapping[str, Any], file: Mapping[str, Any]) -> str:
    """Write this rank's part of a save of ``torch.distributed.checkpoint``. Returns its results, ``packed``."""
    from torch.distributed.checkpoint import FileSystemWriter

    plan, tensor_of = unpacked(file["plan"]), _tensors(memory, job)
    contents = {item.index: content for item, content in zip(plan.items, file["contents"], strict=True)}

    class Planner:
        def resolve_data(self, item: Any) -> Any:
            content = contents[item.index]
            if "storage" in content:
                return tensor_of(content)
            return io.BytesIO(memory.bytes(**content, size_bytes=job["size_bytes"]))

    writer = FileSystemWriter(Path(job["folder"], file["path"]), sync_files=False)
    return packed(writer.write_data(plan, Planner()).value())


def _tensors(memory: Memory, job: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that makes the tensor of a ``View``; views of the same extent share one storage."""
    import torch

    @functools.cache
    def storage(offset: int, length: int) -> Any:
        return memory.storage(offset, length, size_bytes=job["size_bytes"])

    def tensor(view: Mapping[str, Any]) -> Any:
        empty = torch.empty(0, dtype=getattr(torch, view["dtype"]))
        return empty.set_(storage(**view["storage"]), view["offset"], tuple(view["shape"]), tuple(view["stride"]))

    return tensor


WRITERS: dict[str, Callable[..., Any]] = {"archive": write_archive, "tensors": write_tensors, "shards": write_shards}


def answer(memory: Memory, line: bytes) -> dict[str, Any]:
    """Do one job.

    Returns:
        ``results``, one for each file; or ``error``, and whether the volume was ``full``.
    """
    folder = "."
    try:
        job = json.loads(line)
        folder = job["folder"]
        return {"results": [WRITERS[file["kind"]](memory, job, file) for file in job["files"]]}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"[:500].replace("\n", " ")
        return {"error": text, "full": any(reason in text for reason in _FULL) or _is_full(folder)}


def _is_full(folder: str) -> bool:
    """Check the file system: torch does not say why a write failed."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < (1 << 20) or (space.f_files > 0 and space.f_favail == 0)


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
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of a library is no answer
    import torch

    torch.set_num_threads(1)
    memory = Memory(fd)
    while line := sys.stdin.buffer.readline():
        os.write(answers, json.dumps(answer(memory, line)).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
