"""State that ``torch.save`` would write and that its reader, ``torch.load`` with ``weights_only=True``, would refuse.

The reader itself decides, before the file is written: each part that is neither a plain Python value nor a plain tensor is
written to memory and read back. C's pickler finds these parts, so a list of 3 million integers takes 0.05 s.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer_hook.process.patching import replaced

Load = Callable[[Any], Any]
"""Reads a file of ``torch.save``, given as a path or an open file."""
LoadOf = Callable[[str], Load | None]
"""Returns the reader of a file, by its path in the checkpoint; ``None``: it takes any class, or nobody reads the file."""
_REMEDY = "store a plain value or tensor instead, or allow its class with torch.serialization.add_safe_globals before training"
_SAMPLES: dict[type, Any] = {OrderedDict: OrderedDict(a=0), defaultdict: defaultdict(None, a=0), Counter: Counter(a=1)}
_MAPPINGS = (dict, *_SAMPLES)
_SEQUENCES = (list, tuple, set, frozenset)
_REDUCED = (*_MAPPINGS, set, frozenset, bytes, bytearray, complex)
"""Classes that stand in the file as the function that makes their objects."""
_PYTHON_OF = {"b": bool, "i": int, "u": int, "f": float, "c": complex, "U": str}
"""Python's type for numpy's scalars, by the kind of their dtype."""
_taken: set[Any] = set()
"""Kinds of ``_Parts`` that a reader has taken."""


class StateMismatch(ValueError):
    """A state could not be read again, or does not fit the objects of this run. The text names it and the remedy."""


def readable(content: Any, place: str, load: Load) -> Any:
    """Return a state as its reader takes it: with Python's values in place of numpy's scalars, where they are equal.

    Raises ``StateMismatch``: ``load`` would refuse a part of it; the text has its path, which begins with ``place``.
    """
    import torch

    parts, allowed = _Parts(content), tuple(torch.serialization.get_safe_globals())
    new = {(load, allowed, kind): tensor for kind, tensor in parts.kinds.items() if (load, allowed, kind) not in _taken}
    others = [*parts.others, *new.values()]
    if others and not _reads(load, [_sample(each) for each in others]):
        part = next((each for each in others if not _reads(load, [_sample(each)])), others[0])
        kind = part if isinstance(part, type) else type(part)
        where = _path_of(part, content, place, set()) or place
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise StateMismatch(f"{where} is a {name}, which torch.load(weights_only=True) refuses: {_REMEDY}")
    _taken.update(new)
    return parts.converted() if parts.has_numpy else content


def unreadable(states: Iterable[tuple[str, Callable[[], Any], Load]]) -> list[str]:
    """Return why states could not be saved or read again; empty: they can. Each has its place, and is made by a function."""
    reasons = []
    for place, state, load in states:
        try:
            readable(state(), place, load)
        except StateMismatch as error:
            reasons.append(str(error))
        except Exception as error:
            reasons.append(f"{place}: {type(error).__name__}: {error}")
    return reasons


@contextlib.contextmanager
def checked(folder: Path, load_of: LoadOf, refused: Callable[[StateMismatch], None] | None = None) -> Iterator[None]:
    """Pass what this thread writes below ``folder`` with ``torch.save`` through ``readable``.

    ``refused`` is called with the error instead of raising it, and the file is written as it is.
    """
    import torch

    save, thread = torch.save, threading.get_ident()

    @functools.wraps(save)
    def save_readable(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(os.fsdecode(f)) if threading.get_ident() == thread and isinstance(f, str | os.PathLike) else None
        if path is not None and path.is_relative_to(folder) and (load := load_of(path.relative_to(folder).as_posix())):
            try:
                obj = readable(obj, path.name.split(".")[0], load)
            except StateMismatch as error:
                if refused is None:
                    raise
                refused(error)
        save(obj, f, *args, **kwargs)

    with replaced(torch, "save", save_readable):
        yield


def load_plain(file: Any) -> Any:
    """Read a file as the libraries do: without any class that the script has not allowed."""
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)


def _reads(load: Load, parts: list[Any]) -> bool:
    import torch

    file = io.BytesIO()
    try:
        torch.save(parts, file)
        file.seek(0)
        load(file)
    except Exception:
        return False
    return True


def _kept(number: int) -> Any:
    """Stand in a pickle for the object of this number in ``_Parts``; never called."""


class _Parts(pickle.Pickler):
    """A state as a pickle in which all but Python's own values are numbers of objects."""

    def __init__(self, state: Any) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, 2)  # the protocol of torch.save
        self._objects: list[Any] = []
        self.others: list[Any] = []
        """Other objects that the reader has to decide about."""
        self.kinds: dict[Any, Any] = {}
        """Of objects about which the answer is the same for all of a kind, one: of tensors the smallest."""
        self.has_numpy = False
        self.dump(state)

    def reducer_override(self, value: Any) -> Any:
        """As of ``pickle.Pickler``, which does not call it for Python's own values."""
        if value is _kept:
            return NotImplemented
        if type(value) in _SAMPLES:
            self.kinds.setdefault((type(value),), value)
            return NotImplemented
        self._objects.append(self._plain(value))
        return _kept, (len(self._objects) - 1,)

    def _plain(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            kind = _kind_of(value)
            known = self.kinds.setdefault(kind, value)
            if value.numel() < known.numel():
                self.kinds[kind] = value
            return value
        if (number := _python_of(value)) is not None:
            self.has_numpy = True
            return number
        if isinstance(value, type):
            self.kinds[value] = value
        else:
            self.others.append(value)
        return value

    def converted(self) -> Any:
        """Return the state without numpy's scalars. Tensors and other objects are the same ones."""
        self._file.seek(0)
        copy = _Copy(self._file)
        copy.objects = self._objects
        return copy.load()


class _Copy(pickle.Unpickler):
    objects: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        return self.objects.__getitem__  # of functions and classes only _kept is named in the pickle


def _kind_of(tensor: Any) -> tuple[Any, ...]:
    """Return what decides how a tensor stands in the file."""
    attributes = frozenset((name, type(value)) for name, value in getattr(tensor, "__dict__", {}).items())
    return type(tensor), tensor.dtype, tensor.layout, tensor.is_quantized, attributes


def _sample(value: Any) -> Any:
    """Return a small object of the same kind, for a plain tensor one without data; of other classes the object itself."""
    import torch

    if type(value) in _SAMPLES:
        return _SAMPLES[type(value)]
    if not isinstance(value, torch.Tensor):
        return value
    kind, dtype, layout, is_quantized, attributes = _kind_of(value)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter) and layout is torch.strided and not is_quantized and not attributes
    return torch.empty(0, dtype=dtype) if is_plain else value


def _python_of(value: Any) -> Any:
    """Return the Python value that a scalar of numpy is equal to; ``None``: there is none, or it is something else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return None
    if (python := _PYTHON_OF.get(value.dtype.kind)) is None:
        return None
    plain = python(value)
    return plain if plain == value or value != value else None


def _path_of(part: Any, value: Any, place: str, seen: set[int]) -> str | None:
    """Return where in a state a part is; ``None``: not in this ``value``."""
    is_class = isinstance(part, type) and part in _REDUCED
    if value is part or (is_class and type(value) is part and not (part is bytes and value)):  # of bytes only b"" is reduced
        return place
    is_mapping = type(value) in _MAPPINGS
    if id(value) in seen or not (is_mapping or type(value) in _SEQUENCES):
        return None
    seen.add(id(value))
    if getattr(value, "default_factory", None) is part:
        return f"{place}.default_factory"
    for key, inner in value.items() if is_mapping else enumerate(value):
        if is_mapping and (where := _path_of(part, key, f"a key of {place}", seen)) is not None:
            return where
        if type(inner) in (int, float, str):
            continue
        step = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{repr(key)[:80]}]"
        if (where := _path_of(part, inner, place + step, seen)) is not None:
            return where
    return None
