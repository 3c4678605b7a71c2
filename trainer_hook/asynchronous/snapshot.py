"""A consistent copy of the training state in host memory that another process can map.

Only the optimizer's step changes parameters and the optimizer's state. They are copied while the next forward and backward
pass run, and that step waits for the rest of the copy: on the CPU in threads, from an accelerator on a stream of its own into
pinned memory. Everything else is copied at once, and so is all of it where other code may change parameters.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_hook.asynchronous.host_buffer import CHUNK_BYTES, HostBuffer
from trainer_hook.asynchronous.jobs import ALIGNMENT, SnapshotLayout

Pair = tuple[Any, Any]
"""Source and target, both as tensors of bytes."""
Updated = Mapping[int, list[Any]]
"""Tensors that an optimizer's step changes, by the address of their storage."""


def estimated_bytes(*objects: Any) -> int:
    """Return the estimated size of this rank's snapshot: parameters and buffers of modules, state of optimizers."""
    tensors: list[Any] = []
    for thing in objects:
        if hasattr(thing, "parameters"):
            tensors += [*thing.parameters(), *thing.buffers()]
        elif isinstance(state := getattr(thing, "state", None), Mapping):
            tensors += _tensors_in(state)
    own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return CHUNK_BYTES + sum(int(tensor.nbytes) + ALIGNMENT for tensor in own)


def _tensors_in(state: Any) -> Iterable[Any]:
    import torch

    for values in list(state.values()):
        if isinstance(values, dict):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


class TornSnapshot(RuntimeError):
    """Code other than the optimizer's step changed the tensors during the copy: the snapshot is inconsistent."""

    def __init__(self) -> None:
        super().__init__("code other than the optimizer changes parameters between two of its steps")


class Copier:
    """Copies storages into the buffer."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self._streams: dict[Any, Any] = {}

    def copy(self, layout: SnapshotLayout, optimizer: Any) -> Callable[[], None]:
        """Take the snapshot. Returns a function, for any thread, that waits until the copy is complete.

        After the return the caller may change everything except what the optimizer updates in its ``step()``. That step waits
        until the copy is complete, and takes part in it; forward and backward pass run meanwhile. Without an optimizer the copy
        is complete on return.

        Raises ``TornSnapshot``: by the returned function.
        """
        import torch

        target = self._buffer.bytes()
        for text, extent in layout.texts:
            memoryview(target.numpy())[extent.offset : extent.offset + extent.length] = text
        by_device: dict[Any, list[Pair]] = {}
        for storage, extent in layout.storages.values():
            if extent.length:
                place = target[extent.offset : extent.offset + extent.length]
                by_device.setdefault(storage.device, []).append(
                    (torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), place)
                )
        updated = _updated_by(optimizer) if optimizer is not None else {}
        waits = [_copy_on_cpu(by_device.pop(torch.device("cpu"), []), updated, optimizer)]
        waits += [self._copy_from(device, pairs, updated, optimizer) for device, pairs in by_device.items()]

        def wait() -> None:
            for one in waits:
                one()

        return wait

    def _copy_from(self, device: Any, pairs: list[Pair], updated: Updated, optimizer: Any) -> Callable[[], None]:
        """Copy from a CUDA device, first the tensors that a forward pass may change, such as running means.

        Source: CUDA programming guide, "Asynchronous Concurrent Execution": copies from pinned memory on another stream.
        """
        import torch

        self._buffer.pin(device)
        early, late = _split(pairs, updated)
        computing = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        copying = self._streams[device]
        copying.wait_stream(computing)
        with torch.cuda.stream(copying):
            for source, place in early:
                place.copy_(source, non_blocking=True)
            computing.wait_event(copying.record_event())
            for source, place in late:
                place.copy_(source, non_blocking=True)
            done = copying.record_event()
        untouched = _watch(late, updated)

        def before_the_step() -> None:
            untouched()  # recorded before the step is enqueued, long before the copy is complete
            torch.cuda.current_stream(device).wait_event(done)

        if late and not before_next_step(optimizer, before_the_step):
            computing.wait_event(done)

        def wait() -> None:
            with torch.cuda.device(device):  # in another thread a context would be made on the first device
                done.synchronize()
            for source_and_place in (early, late, pairs):
                source_and_place.clear()  # until now the storages must not be freed
            if not untouched():
                raise TornSnapshot

        return wait


def _copy_on_cpu(pairs: list[Pair], updated: Updated, optimizer: Any) -> Callable[[], None]:
    early, late = _split(pairs, updated)
    for source, place in early:
        place.copy_(source)
    if not late:
        return lambda: None
    copying = Copying(late, _watch(late, updated))
    if not before_next_step(optimizer, copying.help):
        copying.help()
    return copying.finish


class Copying:
    """A copy in pieces by several threads, without torch's thread pool and without the interpreter's lock."""

    def __init__(self, pairs: list[Pair], untouched: Callable[[], bool]) -> None:
        self._pieces = deque(
            (place.data_ptr() + at, source.data_ptr() + at, min(CHUNK_BYTES, len(source) - at))
            for source, place in pairs
            for at in range(0, len(source), CHUNK_BYTES)
        )
        self._pairs = pairs
        self._untouched = untouched
        self._left = len(self._pieces)
        self._changed = threading.Condition()
        self._is_torn = False

    def help(self) -> None:
        """Copy the pieces that no other thread has begun, and wait for the rest."""
        while True:
            self._copy_pieces()
            with self._changed:
                # With a timeout: an interrupted thread returns its piece.
                if self._changed.wait_for(lambda: not self._left, timeout=0.1):
                    return

    def _copy_pieces(self) -> None:
        memcpy = _memcpy()
        while self._pieces:
            piece = None
            try:
                piece = self._pieces.popleft()
                memcpy(*piece)
                with self._changed:
                    self._left -= 1
                    piece = None
                    if not self._left:
                        # Before the waiting threads continue: a change by now happened during the copy.
                        self._is_torn = not self._untouched()
                        self._pairs.clear()
                        self._changed.notify_all()
            except IndexError:  # another thread was faster
                return
            except BaseException:
                if piece is not None:
                    self._pieces.append(piece)
                raise

    def finish(self) -> None:
        """As ``help``. Raises ``TornSnapshot``: the copy is useless."""
        self.help()
        if self._is_torn:
            raise TornSnapshot


@functools.cache
def _memcpy() -> Any:
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    return memcpy


def _split(pairs: list[Pair], updated: Updated) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs to copy at once, and those whose source only the optimizer's step changes."""

    def is_late(pair: Pair) -> bool:
        tensors = updated.get(pair[0].data_ptr(), [])
        return bool(tensors and sum(tensor.nbytes for tensor in tensors) >= len(pair[0]))

    return [pair for pair in pairs if not is_late(pair)], [pair for pair in pairs if is_late(pair)]


def _watch(pairs: list[Pair], updated: Updated) -> Callable[[], bool]:
    """Return a function that says whether no tensor was written to between now and its first call."""
    tensors = [tensor for source, _ in pairs for tensor in updated[source.data_ptr()]]
    versions = [tensor._version for tensor in tensors]

    @functools.cache
    def untouched() -> bool:
        return all(tensor._version == version for tensor, version in zip(tensors, versions, strict=True))

    return untouched


def _updated_by(optimizer: Any) -> Updated:
    """Return the tensors that the optimizer changes in its step."""
    tensors = [*(p for group in optimizer.param_groups for p in group["params"]), *_tensors_in(optimizer.state)]
    found: dict[int, list[Any]] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return found


def steps_alone(optimizer: Any) -> bool:
    """Whether this optimizer is known to change parameters in its ``step()`` only: one of torch's own."""
    return type(_plain(optimizer)).__module__.startswith("torch.optim.")


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper. The ``step()`` of another wrapper may change parameters first."""
    return optimizer.optimizer if type(optimizer).__module__.startswith("accelerate.") else optimizer


def before_next_step(optimizer: Any, act: Callable[[], Any]) -> bool:
    """Have ``act`` run once before the optimizer's next step. Returns false for an optimizer without such a hook."""
    inner = _plain(optimizer)
    if not hasattr(inner, "register_step_pre_hook"):
        return False

    def once(*_: Any) -> None:
        handle.remove()
        act()

    handle = inner.register_step_pre_hook(once)
    return True
