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
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainer_hook.asynchronous.layout import SnapshotLayout
from trainer_hook.asynchronous.writer import ArchiveJob, TensorsJob

SMALL_BYTES = 1 << 20
"""Files below it are written at once: that takes less than handing them over."""
DEVICES = ("cpu", "cuda")
_SAVE_FILE_NAMES = ("save_file", "safe_save_file")
"""Under which names modules hold safetensors' ``save_file``. One that is not found writes at once."""


class RankFailed(RuntimeError):
    """Some rank could not write its part of what all of them write. The text is that rank's reason."""


class Later(Protocol):
    """What is still to be written. It ends with ``write``, ``written`` or ``give_up``, called once.

    Where ranks write together, these raise ``RankFailed`` if another one could not.
    """

    def job(self, layout: SnapshotLayout) -> Any:
        """Return what the process that writes is to do."""

    def write(self) -> None:
        """Write it at once, as the save itself would have done."""

    def written(self, result: Any) -> None:
        """The process has written it, and said so."""

    def give_up(self, error: Exception) -> None:
        """It will not be written."""


class _OfOneRank:
    """What nobody else waits for."""

    __slots__ = ()

    def written(self, result: Any) -> None:
        """There is nothing else to do."""

    def give_up(self, error: Exception) -> None:
        """There is nothing else to do."""


@dataclass(frozen=True, slots=True)
class Archive(_OfOneRank):
    """A file of ``torch.save``."""

    path: str
    """Relative to the checkpoint."""
    records: Sequence[tuple[str, Any]]
    """Name and content in the order of writing; the content is bytes or an ``UntypedStorage`` of any device."""
    at_once: Callable[[], None]

    def job(self, layout: SnapshotLayout) -> ArchiveJob:
        """As ``Later.job``."""
        return ArchiveJob(self.path, [(name, layout.of(content)) for name, content in self.records], _archive_options())

    def write(self) -> None:
        """As ``Later.write``."""
        self.at_once()


@dataclass(frozen=True, slots=True)
class Tensors(_OfOneRank):
    """A file of safetensors."""

    path: str
    tensors: Mapping[str, Any]
    metadata: Mapping[str, str] | None
    at_once: Callable[[], None]

    def job(self, layout: SnapshotLayout) -> TensorsJob:
        """As ``Later.job``."""
        return TensorsJob(self.path, [(name, layout.of_tensor(t)) for name, t in self.tensors.items()], self.metadata)

    def write(self) -> None:
        """As ``Later.write``."""
        self.at_once()


def _archive_options() -> list[Any]:
    """Return what ``torch.save`` in this process gives ``PyTorchFileWriter`` besides the path; versions differ in it."""
    from torch import serialization

    names = ("get_crc32_options", "_get_storage_alignment")
    return [getattr(serialization, name)() for name in names if hasattr(serialization, name)]


@dataclass(slots=True)
class Deferred:
    """What a save has left to be written. It refers to the live tensors until a snapshot of them is taken."""

    folder: Path
    files: list[Later] = field(default_factory=list)

    def write(self) -> None:
        """Write all of it at once, as the save itself would have done."""
        waiting = list(self.files)
        while waiting:
            file = waiting.pop(0)
            try:
                file.write()
            except Exception as error:
                for other in waiting:
                    other.give_up(error)
                raise

    def give_up(self, error: Exception) -> None:
        """Nothing of it will be written."""
        for file in self.files:
            file.give_up(error)

    @contextlib.contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Whatever goes wrong inside, other ranks do not wait for this one."""
        try:
            yield
        except Exception as error:
            self.give_up(error)
            raise


_deferred: ContextVar[Deferred | None] = ContextVar("deferred", default=None)


def deferred_here() -> Deferred | None:
    """Return what takes files that are written in this thread now, if anything does."""
    return _deferred.get()


@contextlib.contextmanager
def deferring(folder: Path) -> Iterator[Deferred]:
    """Hold back the large files that this thread writes below ``folder`` in the context."""
    import torch

    deferred, thread = Deferred(folder), threading.get_ident()
    save, save_file = torch.save, _save_file()

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
        token = _deferred.set(deferred)
        stack.callback(_deferred.reset, token)
        yield deferred


def _save_file() -> Any:
    """Return safetensors' ``save_file``, which the save itself may be the first to import."""
    try:
        import safetensors.torch
    except ImportError:
        return None
    return safetensors.torch.save_file


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
