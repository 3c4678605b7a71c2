"""Opens a path below a directory without leaving it: no link is followed, no mount is crossed.

``openat2(2)`` does this in one system call. If the kernel lacks it (before 5.6, gVisor) or a seccomp profile refuses it, the
path is opened one component at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import cache

_OPENAT2 = 437
"""The same number on every architecture that Python's wheels exist for. Source: openat2(2), asm-generic/unistd.h."""
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
"""As the kernel's own limit. Source: path_resolution(7)."""

Resolver = Callable[[int, str, int, int], int]
"""Folder's descriptor, relative path, flags, mode of a new file → descriptor."""


def open_beneath(folder_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path relative to a directory, and nothing outside that directory.

    Args:
        folder_fd: Descriptor of the directory; ``O_PATH`` is enough.
        path: Relative, without ``..``; empty: the directory itself.
        flags: As of open(2); ``O_CLOEXEC`` and ``O_NOFOLLOW`` are added.
        mode: Permissions of a file that ``O_CREAT`` makes.

    Raises:
        OSError: ``ELOOP`` or ``ENOTDIR``: a symbolic link is in the way. ``EXDEV``: another mount, or a path that leads
            out. ``EWOULDBLOCK``: somebody holds a lease on the file. Otherwise as of open(2).
    """
    return resolver()(folder_fd, path, flags, mode)


@cache
def resolver() -> Resolver:
    """Return the resolver of this process: ``openat2`` if available, else ``open_stepwise``."""
    in_kernel = _kernel_resolver()
    fd = os.open("/", _STEP)
    try:
        os.close(in_kernel(fd, "", _STEP, 0))
    except OSError:  # ENOSYS; EPERM, EACCES or whatever else a seccomp profile answers
        return open_stepwise
    finally:
        os.close(fd)
    return in_kernel


def _kernel_resolver() -> Resolver:
    import ctypes  # here: the probes, which start a process every few seconds, do without it

    class OpenHow(ctypes.Structure):
        _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))

    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)
    syscall.restype = ctypes.c_long
    size = ctypes.sizeof(OpenHow)

    @cache
    def how(flags: int, mode: int) -> tuple[OpenHow, int]:
        made = OpenHow(flags, mode, _RESOLVE)
        return made, ctypes.addressof(made)

    def open_in_kernel(folder_fd: int, path: str, flags: int, mode: int) -> int:
        raw = os.fsencode(path) or b"."
        if b"\0" in raw:
            raise ValueError("embedded null byte")
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        _, address = how(flags, mode if flags & os.O_CREAT else 0)
        while (fd := int(syscall(_OPENAT2, folder_fd, raw, address, size))) < 0:
            if (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number), path)
        return fd

    return open_in_kernel


def open_stepwise(folder_fd: int, path: str, flags: int, mode: int = 0) -> int:
    """Do what ``open_beneath`` does without openat2(2).

    Mounts are told by their number, from ``/proc``; without it by the device number of directories, as files of an overlay
    file system may have another one.
    """
    *steps, last = path.split("/") if path else ["."]
    if path and any(step in ("", ".", "..") for step in (*steps, last)):
        raise OSError(errno.EXDEV, "the path leads out of its folder", path)
    mount = _mount_of(folder_fd)
    fd = folder_fd
    try:
        for step in steps:
            fd = _replaced(fd, os.open(step, _STEP, dir_fd=fd), but=folder_fd)
            _expect_mount(fd, mount, path)
        opened = os.open(last, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=fd)
        try:
            _expect_mount(opened, mount, path)
        except OSError:
            os.close(opened)
            raise
        return opened
    finally:
        _replaced(fd, folder_fd, but=folder_fd)


def open_root(path: str, *, follow: bool) -> int:
    """Open the directory that everything else is opened below (``O_PATH``).

    Links in the path are followed only on the mount of ``/``: in a container that is its own file system, which no other
    container can write to. A folder inside a volume can be replaced with a link by every pod that mounts it.

    ``path``: absolute. ``follow``: whether any link is followed.

    Raises:
        OSError: ``ELOOP``: a link on a volume, or any if none is followed. Otherwise as of open(2).
    """
    left, links = path.split("/")[::-1], 0
    fd = os.open("/", _STEP)
    home = _mount_of(fd)
    try:
        while left:
            if (step := left.pop()) in ("", "."):
                continue
            text = _link_text(step, fd)
            if text is None:
                fd = _replaced(fd, os.open(step, _STEP, dir_fd=fd), but=-1)
                continue
            links += 1
            if not follow or links > _MOST_LINKS or _mount_of(fd) != home:
                raise OSError(errno.ELOOP, "a symbolic link on a volume leads there: name the folder itself", path)
            if text.startswith("/"):
                fd = _replaced(fd, os.open("/", _STEP), but=-1)
            left += text.split("/")[::-1]
    except BaseException:
        os.close(fd)
        raise
    return fd


def _link_text(name: str, folder_fd: int) -> str | None:
    is_link = stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    return os.readlink(name, dir_fd=folder_fd) if is_link else None


def _replaced(fd: int, by: int, *, but: int) -> int:
    if fd != but:
        os.close(fd)
    return by


def _expect_mount(fd: int, mount: str, path: str) -> None:
    found = _mount_of(fd)
    if found and found != mount:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)


def _mount_of(fd: int) -> str:
    """Return an identifier of the mount that a descriptor is on; empty: unknown."""
    try:
        about = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        status = os.fstat(fd)
        return f"device {status.st_dev}" if stat.S_ISDIR(status.st_mode) else ""
    try:
        lines = os.read(about, 4096).decode("ascii", errors="replace").splitlines()
    finally:
        os.close(about)
    return next((line for line in lines if line.startswith("mnt_id:")), "")
