"""Jobs of the writer process: the files of a checkpoint, their layout in the memory of a snapshot, how each is written."""

from __future__ import annotations

import functools
import io
import mmap
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALIGNMENT = 64


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
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Memory:
    """The memory of a snapshot, as the writer process sees it during one job."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self.storage = functools.cache(self._storage)
        """Returns an extent as an ``UntypedStorage`` of exactly its length, the same one each time."""

    def _storage(self, extent: Extent) -> Any:
        import torch

        if extent.length == 0:
            return torch.UntypedStorage(0)
        part = torch.frombuffer(self._mapped, dtype=torch.uint8, count=extent.length, offset=extent.offset)
        return part.untyped_storage()

    def content(self, content: Extent | View) -> Any:
        """Return the tensor of a view, or a stream of the bytes of an extent."""
        import torch

        if isinstance(content, Extent):
            return io.BytesIO(self._mapped[content.offset : content.offset + content.length])
        empty = torch.empty(0, dtype=getattr(torch, content.dtype))
        return empty.set_(self.storage(content.storage), content.offset, content.shape, content.stride)


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """A file of ``torch.save``."""

    path: str
    records: list[tuple[str, Extent]]
    options: list[Any]
    """Further arguments of ``PyTorchFileWriter``, from the trainer."""

    def write(self, folder: Path, memory: Memory) -> None:
        """Write the file.

        Source: ``torch.serialization.save``, which makes these calls on the archive.
        """
        import torch

        archive = torch._C.PyTorchFileWriter(str(folder / self.path), *self.options)
        try:
            for name, extent in self.records:
                archive.write_record(name, memory.storage(extent), extent.length)
        finally:
            archive.write_end_of_file()  # also after an error: else torch ends the process when it collects the archive


@dataclass(frozen=True, slots=True)
class TensorsJob:
    """A file of ``safetensors.torch.save_file``."""

    path: str
    tensors: list[tuple[str, View]]
    metadata: dict[str, str] | None

    def write(self, folder: Path, memory: Memory) -> None:
        """Write the file. Tied tensors share memory here, too."""
        from safetensors.torch import save_file

        save_file({name: memory.content(view) for name, view in self.tensors}, str(folder / self.path), self.metadata)


@dataclass(frozen=True, slots=True)
class ShardsJob:
    """One rank's part of a save of ``torch.distributed.checkpoint``: ``write_data`` of a ``FileSystemWriter``."""

    path: str
    """Of the folder."""
    plan: bytes
    """A pickled ``SavePlan``."""
    contents: list[Extent | View]
    """One for each item of the plan."""

    def write(self, folder: Path, memory: Memory) -> bytes:
        """Write the files. Returns the pickled results of ``write_data``."""
        from torch.distributed.checkpoint import FileSystemWriter

        plan = pickle.loads(self.plan)  # noqa: S301 - from the parent process
        contents = {item.index: content for item, content in zip(plan.items, self.contents, strict=True)}

        class Planner:
            def resolve_data(self, item: Any) -> Any:
                return memory.content(contents[item.index])

        writer = FileSystemWriter(folder / self.path, sync_files=False)
        return pickle.dumps(writer.write_data(plan, Planner()).value())


@dataclass(frozen=True, slots=True)
class Job:
    """The large files of one checkpoint."""

    folder: str
    size_bytes: int
    """Of the memory."""
    files: list[ArchiveJob | TensorsJob | ShardsJob]


@dataclass(slots=True)
class SnapshotLayout:
    """Assigns each storage a place; a storage that several files or tensors share has one place."""

    size_bytes: int = 0
    storages: dict[tuple[str, int, int], tuple[Any, Extent]] = field(default_factory=dict)
    texts: list[tuple[bytes, Extent]] = field(default_factory=list)

    def of(self, content: Any) -> Extent:
        """Return the place of bytes or of a storage."""
        if isinstance(content, bytes):
            extent = self._next(len(content))
            self.texts.append((content, extent))
            return extent
        key = (str(content.device), content.data_ptr(), content.nbytes())
        if key not in self.storages:
            self.storages[key] = (content, self._next(content.nbytes()))
        return self.storages[key][1]

    def of_tensor(self, tensor: Any) -> View:
        """Return the place of a tensor's storage, and the tensor's view of it."""
        return View(
            self.of(tensor.untyped_storage()),
            str(tensor.dtype).removeprefix("torch."),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    def _next(self, length: int) -> Extent:
        offset = -(-self.size_bytes // ALIGNMENT) * ALIGNMENT
        self.size_bytes = offset + length
        return Extent(offset, length)
