"""The memory of a snapshot: shared with the writer process, and pinned where an accelerator copies into it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from typing import Any

CHUNK_BYTES = 16 << 20
"""Size of one mapping or copy."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device."""
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14. On an older one the first save takes longer."""


def _cuda(device: Any, function: str, *arguments: int) -> bool:
    """Call a function of the CUDA runtime. Returns whether it succeeded.

    In a thread of its own, which ends: CUDA keeps the error of a failed call for its thread, where torch would take it for an
    error of the next kernel; and the first call of a thread makes a context on its current device.
    """
    import torch

    codes: list[int] = []

    def call() -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):  # without CUDA pinning is pointless
            codes.append(int(getattr(torch.cuda.cudart(), function)(*arguments)))

    thread = threading.Thread(target=call, name="checkpoint-pin", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread available
        thread.start()
        thread.join()
    return codes == [0]


class HostBuffer:
    """Anonymous shared memory that all saves share. It grows and never shrinks."""

    def __init__(self) -> None:
        """Create it with size 0. Raises ``OSError``: this kernel has no memfd."""
        # Not /dev/shm: that has 64 MiB in a container.
        self.fd = os.memfd_create("checkpoint-snapshot", os.MFD_CLOEXEC)
        self.size_bytes = 0
        self._map: mmap.mmap | None = None
        self._pinned: tuple[Any, int] | None = None
        """Device and address."""
        self._pinning_failed = False

    def reserve(self, size_bytes: int) -> None:
        """Grow to at least this size, with pages allocated now and not during a copy.

        Raises ``OSError``: there is too little memory.
        """
        if size_bytes <= self.size_bytes:
            return
        self._unpin()
        os.posix_fallocate(self.fd, 0, size_bytes)
        self._map = mmap.mmap(self.fd, size_bytes)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.size_bytes = size_bytes
        self._populate(self._map)

    def prepare(self, size_bytes: int, device: Any) -> None:
        """Reserve memory, and pin it for a device that is not ``None``. Without an error: the first save tries again."""
        with contextlib.suppress(OSError, RuntimeError):
            self.reserve(size_bytes)
            if device is not None:
                self.pin(device)

    def bytes(self) -> Any:
        """Return all of it as a tensor of bytes."""
        import torch

        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def pin(self, device: Any) -> None:
        """Pin the memory for faster copies from an accelerator. Failure is harmless."""
        if self._pinned is None and not self._pinning_failed and self._map is not None:
            address = self.bytes().data_ptr()
            if _cuda(device, "cudaHostRegister", address, self.size_bytes, _PORTABLE):
                self._pinned = device, address
            else:
                self._pinning_failed = True

    def close(self) -> None:
        """Free the memory."""
        self._unpin()
        self._map = None
        os.ftruncate(self.fd, 0)  # forked children share the descriptor: closing it would free nothing
        os.close(self.fd)

    def _unpin(self) -> None:
        pinned, self._pinned, self._pinning_failed = self._pinned, None, False
        if pinned is not None:
            _cuda(pinned[0], "cudaHostUnregister", pinned[1])

    def _populate(self, memory: mmap.mmap) -> None:
        """Map every page now, to save page faults during the first copy."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        with contextlib.suppress(OSError, AttributeError):
            madvise = ctypes.CDLL(None).madvise  # unlike mmap.madvise this lets other threads run
            for offset in range(0, len(memory), CHUNK_BYTES):
                length = min(CHUNK_BYTES, len(memory) - offset)
                if madvise(ctypes.c_void_p(address + offset), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                    return
