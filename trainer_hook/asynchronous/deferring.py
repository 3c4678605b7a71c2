"""Lets a save run as it is, but keeps what ``torch.save`` and safetensors would write, so that it can be written later.

Whatever builds the checkpoint (the Trainer, its subclasses, PEFT) does all that it does otherwise; only large files are held
back, in the form that gives the same bytes later: the records of the archive, or the tensors and their metadata.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SMALL_BYTES = 1 << 20
"""Files below it are written at once: that takes less than handing them over."""
DEVICES = ("cpu", "cuda")
_SAVE_FILE_NAMES = ("save_file", "safe_save_file")
"""Under which names modules hold safetensors' ``save_file``. One that is not found writes at once."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A file of ``torch.save``."""

    path: str
    """Relative to the checkpoint."""
    records: Sequence[tuple[str, Any]]
    """Name and content in the order of writing; the content is bytes or an ``UntypedStorage`` of any device."""
    write: Callable[[], None]
    """Writes the file at once."""

    @property
    def storages(self) -> list[Any]:
        """The storages, each as often as it is written."""
        return [content for _, content in self.records if not isinstance(content, bytes)]


@dataclass(frozen=True, slots=True)
class Tensors:
    """A file of safetensors."""

    path: str
    tensors: Mapping[str, Any]
    metadata: Mapping[str, str] | None
    write: Callable[[], None]

    @property
    def storages(self) -> list[Any]:
        """The storages behind the tensors; tied ones come several times."""
        return [tensor.untyped_storage() for tensor in self.tensors.values()]


@dataclass(slots=True)
class Deferred:
    """What a save has left to be written. It refers to the live tensors until a snapshot of them is taken."""

    files: list[Archive | Tensors] = field(default_factory=list)

    def write(self) -> None:
        """Write all of it at once, as the save itself would have done."""
        for file in self.files:
            file.write()


@contextlib.contextmanager
def deferring(folder: Path) -> Iterator[Deferred]:
    """Hold back the large files that this thread writes below ``folder`` in the context."""
    import torch

    deferred, thread = Deferred(), threading.get_ident()
    save, save_file = torch.save, getattr(sys.modules.get("safetensors.torch"), "save_file", None)

    def below(file: Any) -> str | None:
        if threading.get_ident() != thread or not isinstance(file, str | os.PathLike):
            return None
        path = Path(os.fsdecode(file))
        return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else None

    @functools.wraps(save)
    def save_later(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path, write = below(f), functools.partial(save, obj, f, *args, **kwargs)
        records = _records(obj) if path is not None and not args and not kwargs else None
        if path is None or records is None:
            write()
        else:
            deferred.files.append(Archive(path, records, write))

    def save_file_later(tensors: Any, filename: Any, metadata: Any = None) -> None:
        assert save_file is not None
        path, write = below(filename), functools.partial(save_file, tensors, filename, metadata)
        if path is None or not _can_wait(tensors):
            write()
        else:
            deferred.files.append(Tensors(path, dict(tensors), metadata, write))

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch, "save", save_later))
        for module, name in _holders(save_file) if save_file is not None else []:
            stack.enter_context(_replaced(module, name, save_file_later))
        yield deferred


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _holders(function: Any) -> list[tuple[Any, str]]:
    modules = list(sys.modules.values())
    return [(m, name) for m in modules for name in _SAVE_FILE_NAMES if getattr(m, "__dict__", {}).get(name) is function]


class _Records:
    """Takes the place of the archive that ``torch.save`` writes to."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any]] = []

    def write_record(self, name: str, content: Any, size: int) -> None:
        if isinstance(content, str):
            content = content.encode()
        if isinstance(content, _OnDevice):
            content = content.storage
        self.records.append((name, content))


@dataclass(frozen=True, slots=True)
class _OnDevice:
    storage: Any


def _records(obj: Any) -> list[tuple[str, Any]] | None:
    """Return what ``torch.save`` would write, without a copy of any tensor. ``None``: this one is not to be deferred."""
    import torch

    archive, thread = _Records(), threading.get_ident()
    storage_class = torch.UntypedStorage
    inherited = storage_class.cpu
    # What lies on an accelerator is brought to the host by ``storage.cpu()``, which would hold this thread.
    storage_class.cpu = lambda storage: _OnDevice(storage) if threading.get_ident() == thread else inherited(storage)
    try:
        torch.serialization._save(obj, archive, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    except Exception:  # the real one says what is wrong, if anything is
        return None
    finally:
        del storage_class.cpu  # the inherited one is there again
    contents = [content for _, content in archive.records]
    storages = [content for content in contents if not isinstance(content, bytes)]
    if any(not torch.is_storage(s) or s.device.type not in DEVICES for s in storages):
        return None
    return archive.records if sum(s.nbytes() for s in storages) >= SMALL_BYTES else None


def _can_wait(tensors: Any) -> bool:
    """Whether these are plain tensors that make up most of the storages in which they lie."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    if not isinstance(tensors, dict) or not all(type(t) in plain and t.layout == torch.strided for t in tensors.values()):
        return False
    if any(t.device.type not in DEVICES for t in tensors.values()):
        return False
    size = sum(int(tensor.nbytes) for tensor in tensors.values())
    try:
        storages = {s.data_ptr(): int(s.nbytes()) for s in (tensor.untyped_storage() for tensor in tensors.values())}
    except RuntimeError:  # there is none
        return False
    return size >= SMALL_BYTES and sum(storages.values()) <= 2 * size
