"""Layout of a snapshot in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer_hook.asynchronous.jobs import Extent, View

ALIGNMENT = 64


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
