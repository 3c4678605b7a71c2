"""Defers the large files of a save: keeps what ``torch.save`` and safetensors would write, so that it can be written later.

The code that builds the checkpoint (the Trainer, its subclasses, PEFT) runs unchanged. A large file is kept in the form that
gives the same bytes later: the records of the archive, or the tensors and their metadata.
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
from typing import Any

from trainer_hook.asynchronous.jobs import ArchiveJob, SnapshotLayout, TensorsJob
from trainer_hook.process.patching import replaced

SMALL_BYTES = 1 << 20
"""Smaller files are written at once, which is faster than handing them over."""
DEVICES = ("cpu", "cuda")
_SAVE_FILE_NAMES = ("save_file", "safe_save_file")
"""Names under which modules import safetensors' ``save_file``. Under another name it writes at once."""


class RankFailed(RuntimeError):
    """A rank could not write its part of a sharded save. The text is its reason."""


class DeferredFile:
    """A file that is still to be written. Exactly one of ``write``, ``written`` and ``give_up`` is called, once.

    Where ranks write together, these raise ``RankFailed`` if another rank could not write its part.
    """

    __slots__ = ()

    def job(self, layout: SnapshotLayout) -> Any:
        """Return the job of the writer process."""
        raise NotImplementedError

    def write(self) -> None:
        """Write the file in this process, as the save itself would have done."""
        raise NotImplementedError

    def written(self, result: Any) -> None:
        """The writer process has written the file; ``result`` is its answer."""

    def give_up(self, error: Exception) -> None:
        """The file will not be written."""


@dataclass(frozen=True, slots=True)
class _Archive(DeferredFile):
    """A file of ``torch.save``."""

    path: str
    """Relative to the checkpoint."""
    records: Sequence[tuple[str, Any]]
    """Name and content in the order of writing; the content is bytes or an ``UntypedStorage`` of any device."""
    save: Callable[[], None]

    def job(self, layout: SnapshotLayout) -> ArchiveJob:
        from torch import serialization

        # The arguments that torch.save of this version gives PyTorchFileWriter after the path.
        names = [n for n in ("get_crc32_options", "_get_storage_alignment") if hasattr(serialization, n)]
        records = [(name, layout.of(content)) for name, content in self.records]
        return ArchiveJob(self.path, records, [getattr(serialization, name)() for name in names])

    def write(self) -> None:
        self.save()


@dataclass(frozen=True, slots=True)
class _Tensors(DeferredFile):
    """A file of safetensors."""

    path: str
    tensors: Mapping[str, Any]
    metadata: dict[str, str] | None
    save: Callable[[], None]

    def job(self, layout: SnapshotLayout) -> TensorsJob:
        return TensorsJob(self.path, [(name, layout.of_tensor(t)) for name, t in self.tensors.items()], self.metadata)

    def write(self) -> None:
        self.save()


@dataclass(slots=True)
class Deferred:
    """The deferred files of a save. They refer to the live tensors until a snapshot of them is taken."""

    folder: Path
    files: list[DeferredFile] = field(default_factory=list)

    def write(self) -> None:
        """Write all files in this process."""
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
        """After an error inside, release the other ranks, which would wait for this one."""
        try:
            yield
        except Exception as error:
            self.give_up(error)
            raise


_deferred: ContextVar[Deferred | None] = ContextVar("deferred", default=None)


def deferred_here() -> Deferred | None:
    """Return the ``Deferred`` of the surrounding ``deferring``; ``None``: there is none."""
    return _deferred.get()


@contextlib.contextmanager
def deferring(folder: Path) -> Iterator[Deferred]:
    """Defer the large files that this thread writes below ``folder``."""
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
            deferred.files.append(_Archive(path, records, write))

    def save_file_later(tensors: Any, filename: Any, metadata: Any = None) -> None:
        assert save_file is not None
        path, write = below(filename), functools.partial(save_file, tensors, filename, metadata)
        if path is None or not _can_wait(tensors):
            write()
        else:
            deferred.files.append(_Tensors(path, dict(tensors), metadata, write))

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch, "save", save_later))
        for module in list(sys.modules.values()) if save_file is not None else ():
            for name in _SAVE_FILE_NAMES:
                if getattr(module, "__dict__", {}).get(name) is save_file:
                    stack.enter_context(replaced(module, name, save_file_later))
        token = _deferred.set(deferred)
        stack.callback(_deferred.reset, token)
        yield deferred


def _save_file() -> Any:
    """Return safetensors' ``save_file``, imported before the save does; ``None``: not installed."""
    try:
        import safetensors.torch
    except ImportError:
        return None
    return safetensors.torch.save_file


class _Records(list[tuple[str, Any]]):
    """Takes the place of the archive that ``torch.save`` writes to."""

    def write_record(self, name: str, content: Any, size: int) -> None:
        if isinstance(content, str):
            content = content.encode()
        self.append((name, content.storage if isinstance(content, _OnDevice) else content))


@dataclass(frozen=True, slots=True)
class _OnDevice:
    storage: Any


def _records(obj: Any) -> list[tuple[str, Any]] | None:
    """Return the records that ``torch.save`` would write, without a copy of any tensor. ``None``: not to be deferred."""
    import torch

    archive, thread = _Records(), threading.get_ident()
    storage_class = torch.UntypedStorage
    inherited = storage_class.cpu

    def cpu(storage: Any) -> Any:  # copies from an accelerator, and would hold this thread
        return _OnDevice(storage) if threading.get_ident() == thread else inherited(storage)

    try:
        with replaced(storage_class, "cpu", cpu):
            torch.serialization._save(obj, archive, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    except Exception:  # torch.save itself will raise it
        return None
    contents = [content for _, content in archive]
    storages = [content for content in contents if not isinstance(content, bytes)]
    if any(not torch.is_storage(s) or s.device.type not in DEVICES for s in storages):
        return None
    return archive if sum(s.nbytes() for s in storages) >= SMALL_BYTES else None


def _can_wait(tensors: Any) -> bool:
    """Whether these are plain tensors that fill most of their storages."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    if not isinstance(tensors, dict) or not all(type(t) in plain and t.layout == torch.strided for t in tensors.values()):
        return False
    if any(t.device.type not in DEVICES for t in tensors.values()):
        return False
    size = sum(int(tensor.nbytes) for tensor in tensors.values())
    try:
        storages = {s.data_ptr(): int(s.nbytes()) for s in (tensor.untyped_storage() for tensor in tensors.values())}
    except RuntimeError:  # a tensor without storage
        return False
    return size >= SMALL_BYTES and sum(storages.values()) <= 2 * size
