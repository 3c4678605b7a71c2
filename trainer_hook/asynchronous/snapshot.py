"""A consistent copy of the training state in host memory that another process can map.

Parameters and the optimizer's state change nowhere but in the optimizer's step, so their copy is made while the next forward
and backward pass run, and that step waits for what is left of it: on the CPU in a thread, from an accelerator on a stream of
its own into pinned memory. Everything else is copied at once, and so is all of it where others may change parameters, too.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer_hook.asynchronous.host_buffer import CHUNK_BYTES, HostBuffer
from trainer_hook.asynchronous.layout import ALIGNMENT, SnapshotLayout

Pair = tuple[Any, Any]
"""Source and place, both as bytes."""
Updated = Mapping[int, list[Any]]
"""What an optimizer's step changes: tensors by the address of the storage in which they lie."""


def estimated_bytes(*objects: Any) -> int:
    """Return about how much a snapshot will take on this rank: of modules parameters and buffers, of optimizers their state."""
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
    """Something else than the optimizer changed what was being copied: the snapshot is of no single step."""

    def __init__(self) -> None:
        super().__init__("something besides the optimizer changes parameters between two of its steps")


class Copier:
    """Copies storages into the buffer."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._buffer = buffer
        self._streams: dict[Any, Any] = {}

    def copy(self, layout: SnapshotLayout, optimizer: Any) -> Callable[[], None]:
        """Take the snapshot. Returns what makes sure, from any thread, that all of it has arrived.

        From the return on the caller may change everything but what the optimizer updates in its ``step()``; that step waits
        by itself until the copy is complete, and takes part in it. The rest of a step, forward and backward, runs meanwhile.

        Args:
            layout: What is copied, and where to.
            optimizer: Nothing but its ``step()`` changes the parameters. ``None``: anybody may, so nothing is put off.

        Raises:
            TornSnapshot: By the returned function.
        """
        target = self._buffer.bytes()
        for text, extent in layout.texts:
            memoryview(target.numpy())[extent.offset : extent.offset + extent.length] = text
        by_device: dict[Any, list[Pair]] = {}
        for storage, extent in layout.storages.values():
            if extent.length:
                place = target[extent.offset : extent.offset + extent.length]
                by_device.setdefault(storage.device, []).append((_as_bytes(storage), place))
        updated = _updated_by(optimizer) if optimizer is not None else {}
        waits = [_copy_on_cpu(by_device.pop(_cpu(), []), updated, optimizer)]
        waits += [self._copy_from(device, pairs, updated, optimizer) for device, pairs in by_device.items()]

        def wait() -> None:
            for one in waits:
                one()

        return wait

    def _copy_from(self, device: Any, pairs: list[Pair], updated: Updated, optimizer: Any) -> Callable[[], None]:
        """Copy from a CUDA device, first what a forward pass may change, such as running means.

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
            untouched()  # noted now: the step is enqueued, and so seen, long before the copy has arrived
            torch.cuda.current_stream(device).wait_event(done)

        if late and not before_next_step(optimizer, before_the_step):
            computing.wait_event(done)

        def wait() -> None:
            with torch.cuda.device(device):  # another thread's current device is the first one: a context would be made there
                done.synchronize()
            for source_and_place in (early, late, pairs):
                source_and_place.clear()  # until now nothing of it may be freed and used for something else
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
    """A copy in pieces, which whoever has time takes part in. Without torch's threads, and without the interpreter's lock."""

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
        """Copy what nobody else has begun, and wait for the rest."""
        while True:
            self._copy_what_is_left()
            with self._changed:
                # Not for ever: a piece comes back from a thread that was interrupted while it copied.
                if self._changed.wait_for(lambda: not self._left, timeout=0.1):
                    return

    def _copy_what_is_left(self) -> None:
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
                        self._complete()
            except IndexError:  # another thread was faster
                return
            except BaseException:
                if piece is not None:
                    self._pieces.append(piece)
                raise

    def _complete(self) -> None:
        # Before anybody may go on: a change that is seen here was made while the copy was.
        self._is_torn = not self._untouched()
        self._pairs.clear()
        self._changed.notify_all()

    def finish(self) -> None:
        """Help.

        Raises:
            TornSnapshot: The copy is of no use.
        """
        self.help()
        if self._is_torn:
            raise TornSnapshot


@functools.cache
def _memcpy() -> Any:
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
    return memcpy


def _split(pairs: list[Pair], updated: Updated) -> tuple[list[Pair], list[Pair]]:
    """Return what has to be copied at once, and what only the optimizer's step changes."""

    def is_late(pair: Pair) -> bool:
        tensors = updated.get(pair[0].data_ptr(), [])
        return bool(tensors and sum(tensor.nbytes for tensor in tensors) >= len(pair[0]))

    return [pair for pair in pairs if not is_late(pair)], [pair for pair in pairs if is_late(pair)]


def _watch(pairs: list[Pair], updated: Updated) -> Callable[[], bool]:
    """Return what says whether none of the tensors was written to until it was first asked."""
    tensors = [tensor for source, _ in pairs for tensor in updated[source.data_ptr()]]
    versions = [tensor._version for tensor in tensors]

    @functools.cache
    def untouched() -> bool:
        return all(tensor._version == version for tensor, version in zip(tensors, versions, strict=True))

    return untouched


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def _as_bytes(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _updated_by(optimizer: Any) -> Updated:
    """Return what the optimizer changes in its step."""
    tensors = [*(p for group in optimizer.param_groups for p in group["params"]), *_tensors_in(optimizer.state)]
    found: dict[int, list[Any]] = {}
    for tensor in tensors:
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    return found


def steps_alone(optimizer: Any) -> bool:
    """Whether it is known that this optimizer changes parameters in its ``step()`` only: torch's own do, others may not."""
    return type(_plain(optimizer)).__module__.startswith("torch.optim.")


def _plain(optimizer: Any) -> Any:
    """Return the optimizer in accelerate's wrapper. In any other one, ``step()`` may do something first."""
    return optimizer.optimizer if type(optimizer).__module__.startswith("accelerate.") else optimizer


def before_next_step(optimizer: Any, act: Callable[[], Any]) -> bool:
    """Have ``act`` run before the optimizer's next step, once. Returns false for an optimizer that knows no such hook."""
    inner = _plain(optimizer)
    if not hasattr(inner, "register_step_pre_hook"):
        return False

    def once(*_: Any) -> None:
        handle.remove()
        act()

    handle = inner.register_step_pre_hook(once)
    return True
