"""Access to the shared volume, and to the sidecar's state directory. No other module opens files there.

The trainer writes to the volume and has fewer rights than the sidecar, so no path on it is trusted: every access starts at
the descriptor of a directory, no symbolic link is followed, no mount is crossed, and only regular files are read or written,
without blocking on a fifo. Each call resolves its path again, so a directory that is replaced meanwhile can change the
content found, but never lead outside.

Standard library only: the command line uses it, too.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sidecar.core.format.obstacles import may_pass
from sidecar.volume.descriptors import FOLDER, closed_on_error, opened, remove_tree, set_mode, write_all
from sidecar.volume.resolve import Resolver, open_beneath, open_root

REFUSED = frozenset({errno.ELOOP, errno.EXDEV, errno.ENOTDIR})
"""Errors for a link, a mount or a file in the place of a directory."""
HELD = os.O_PATH | os.O_DIRECTORY
_FILE = os.O_NONBLOCK | os.O_NOCTTY

OnRefused = Callable[[str, OSError], None]


class NotRegular(OSError):
    """A file's name belongs to something other than a regular file, such as a fifo."""


class Folder:
    """A directory, held open by its descriptor for the lifetime of this object.

    Args:
        path: Where it is, for messages, and for opening it at first use. Links in this path are followed then, as
            ``resolve.open_root`` says: the operator chose it.
        fd: Its descriptor, where it is open already; this object closes it.
        on_refused: Called with each refused path that crosses a link or a mount, and the error.
        resolve: Opens paths below it.
    """

    def __init__(
        self, path: Path, fd: int | None = None, *, on_refused: OnRefused | None = None, resolve: Resolver = open_beneath
    ) -> None:
        self.path = path
        self.on_refused = on_refused
        self.resolve = resolve
        self._opening = threading.Lock()
        self._fd: int | None = None
        self._real: str | None = None
        """Resolved path when it was opened; it stays valid until a component is replaced by a link."""
        if fd is not None:
            self._hold(fd)

    def __truediv__(self, inside: str) -> Place:
        return Place(self, "") / inside

    @property
    def fd(self) -> int:
        """Its descriptor (``O_PATH``).

        Raises:
            OSError: It cannot be opened.
        """
        with self._opening:
            if self._fd is not None:
                return self._fd
            fd = self._hold(self._open_root(str(self.path.absolute()), follow=True))
            with suppress(OSError):  # without /proc
                self._real = str(Path(f"/proc/self/fd/{fd}").readlink())
            return fd

    def open(self, inside: str, flags: int, mode: int = 0) -> int:
        """Open a relative path as ``resolve.open_beneath`` does. Errors name the whole path."""
        try:
            return self.resolve(self.fd, inside, flags, mode)
        except OSError as error:
            error.filename = f"{self.path}/{inside}" if inside else str(self.path)
            if self.on_refused is not None and error.errno in REFUSED:
                self.on_refused(error.filename, error)
            raise

    def refresh(self) -> None:
        """Check that its path still leads to it; if a volume was mounted there anew, hold that one instead.

        Raises:
            OSError: The path does not exist: the volume is not mounted. ``ELOOP``: the path contains a new link.
        """
        _ = self.fd
        fd = self._open_root(self._real or os.path.realpath(self.path), follow=False)
        with self._opening, closed_on_error(fd):
            if self._fd is None or not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                self._hold(fd)  # the previous one may be in use: it is closed with this object
                return
        os.close(fd)

    def _open_root(self, path: str, *, follow: bool) -> int:
        try:
            return open_root(path, follow=follow)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def close(self) -> None:
        """Close the descriptor before the end of this object's lifetime."""
        if self._fd is not None:
            self._fd = -1
            self._closing()

    def _hold(self, fd: int) -> int:
        self._fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        return fd


@dataclass(frozen=True, slots=True)
class Place:
    """A path in a folder, which need not exist. ``inside`` is empty for the folder itself.

    Every method raises ``OSError`` with the whole path; ``ELOOP``, ``ENOTDIR`` or ``EXDEV``: a link or a mount is in the way.
    """

    folder: Folder
    inside: str

    def __truediv__(self, inside: str) -> Place:
        if not inside:
            return self
        if inside.startswith("/") or ".." in inside.split("/"):
            raise ValueError(f"{inside!r} leads out of {self}")
        return Place(self.folder, f"{self.inside}/{inside}" if self.inside else inside)

    def __str__(self) -> str:
        return f"{self.folder.path}/{self.inside}" if self.inside else str(self.folder.path)

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.inside.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        """The directory that contains it."""
        return Place(self.folder, self.inside.rpartition("/")[0])

    def with_name(self, name: str) -> Place:
        """Return the place of another name in the same directory."""
        return self.parent / name

    # Files.

    def open_file(self, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
        """Open a regular file without blocking, and return its descriptor.

        Raises:
            NotRegular: It is a directory, fifo, socket or device.
        """
        try:
            fd = self.folder.open(self.inside, flags | _FILE, mode)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.EISDIR):  # a fifo or socket without a reader; a directory
                raise self._not_regular() from error
            raise
        with closed_on_error(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._not_regular()
        return fd

    def read(self, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
        """Return the beginning of a regular file, and its status."""
        with opened(self.open_file()) as fd:
            content = b""
            while len(content) < max_bytes and (more := os.read(fd, max_bytes - len(content))):
                content += more
            return content, os.fstat(fd)

    def create(self, mode: int = 0o644, *, access: int = os.O_WRONLY) -> int:
        """Return the descriptor of a new, empty file, with ``mode`` whatever the umask. An entry of its name is removed."""
        flags = access | os.O_CREAT | os.O_EXCL
        try:
            fd = self.folder.open(self.inside, flags, mode)
        except FileExistsError:
            self.discard()
            fd = self.folder.open(self.inside, flags, mode)
        with closed_on_error(fd):
            set_mode(fd, mode)
        return fd

    def publish(self, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file atomically: temporary file next to it, fsync, rename, fsync of the directory. The umask is ignored."""
        with self._named(), self.parent.listed() as folder:
            temporary = f".{self.name}.{uuid.uuid4().hex[:8]}.tmp"
            try:
                with opened(open_beneath(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)) as fd:
                    set_mode(fd, mode)
                    write_all(fd, content)
                    os.fsync(fd)
                os.rename(temporary, self.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            os.fsync(folder)

    # Names.

    def status(self) -> os.stat_result:
        """Return the status of the entry; of a link, the link's own."""
        with self._named(), self._in_parent() as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def is_folder(self) -> bool:
        """Whether it is a directory, not a link to one. Raises ``OSError``: the volume failed."""
        try:
            return stat.S_ISDIR(self.status().st_mode)
        except OSError as error:
            if may_pass(error.errno):
                raise
            return False

    def remove(self) -> None:
        """Remove a file, link, fifo or socket; a missing one is not an error."""
        with suppress(FileNotFoundError), self._named(), self._in_parent() as (folder, name):
            os.unlink(name, dir_fd=folder)

    def make_link(self, text: str) -> None:
        """Make a symbolic link. Nothing here follows it; others may."""
        with self._named(), self._in_parent() as (folder, name):
            os.symlink(text, name, dir_fd=folder)

    def read_link(self) -> str:
        """Return the target text of a symbolic link."""
        with self._named(), self._in_parent() as (folder, name):
            return os.readlink(name, dir_fd=folder)

    def rename(self, target: Place) -> None:
        """Rename it, also into another directory; an existing file of the new name is replaced."""
        with self._named(), self._in_parent() as (source, name), target._in_parent() as (into, new):
            os.rename(name, new, src_dir_fd=source, dst_dir_fd=into)

    def discard(self) -> bool:
        """Remove the entry, also a whole tree. Parts that cannot be removed stay. Returns whether nothing stayed."""
        try:
            with self._in_parent() as (folder, name):
                remove_tree(folder, name)
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return True

    def require_removable(self) -> None:
        """Return if this user may remove the entries of every directory of a tree.

        Raises:
            OSError: It may not, or a directory cannot be read.
        """
        with self.held() as held:
            for inside in ["", *(path for path, status in (held / "").walk() if stat.S_ISDIR(status.st_mode))]:
                with opened(held.open(inside, HELD)) as fd:
                    if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self / inside))

    # Directories.

    def make_folder(self) -> None:
        """Make a directory and its missing parents; an existing one is not an error."""
        try:
            self._make_in_parent()
        except FileNotFoundError:
            if "/" not in self.inside:
                raise
            self.parent.make_folder()
            self._make_in_parent()

    def own_folder(self, mode: int) -> bool:
        """Make a directory of the sidecar's own; a link or file of its name is removed.

        Its permissions are set if it belongs to this user.

        Returns:
            Whether a link or file was removed.
        """
        self.make_folder()
        was_other = not self.is_folder()
        if was_other:
            self.remove()
            self.make_folder()
        with self.listed() as fd:
            if os.fstat(fd).st_uid == os.geteuid():
                set_mode(fd, mode)
        return was_other

    def listed(self) -> AbstractContextManager[int]:
        """Open a directory for reading and fsync, and yield its descriptor."""
        return opened(self.folder.open(self.inside, FOLDER))

    @contextmanager
    def held(self) -> Iterator[Folder]:
        """Hold a directory open: access through it stays in this directory, also after its name is given to another one."""
        above = self.folder
        fd = above.open(self.inside, HELD)
        folder = Folder(Path(str(self)), fd, on_refused=above.on_refused, resolve=above.resolve)
        try:
            yield folder
        finally:
            folder.close()

    def entries(self) -> list[tuple[str, bool]]:
        """Return the names in a directory, and whether each is a directory itself."""
        with self.listed() as fd, os.scandir(fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def walk(self, *, lenient: bool = False) -> Iterator[tuple[str, os.stat_result]]:
        """Yield every entry below a directory: its relative path and its status; a directory before its entries.

        One directory is open at a time, however deep the tree is.

        ``lenient``: skip entries that cannot be read, or were deleted meanwhile.
        """
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(self.held())
            except OSError:
                if lenient:
                    return
                raise
            left = [""]
            while left:
                for path, status in _look_into(folder, left.pop(), lenient=lenient):
                    if stat.S_ISDIR(status.st_mode):
                        left.append(path)
                    yield path, status

    def change_mode(self, mode: int) -> None:
        """Set the permissions of a directory."""
        with self._named(), self.listed() as fd:
            set_mode(fd, mode)

    def space(self) -> os.statvfs_result:
        """Return the space of its file system."""
        with self.listed() as fd:
            return os.fstatvfs(fd)

    def _make_in_parent(self) -> None:
        with self._named(), self._in_parent() as (folder, name), suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)

    @contextmanager
    def _in_parent(self) -> Iterator[tuple[int, str]]:
        """Yield the descriptor of its directory, and its name there."""
        above, _, name = self.inside.rpartition("/")
        if not above:
            yield self.folder.fd, name or "."
            return
        with opened(self.folder.open(above, HELD)) as fd:
            yield fd, name

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Put the whole path into errors of calls relative to a descriptor."""
        try:
            yield
        except OSError as error:
            if str(error.filename).startswith("/"):
                raise
            raise OSError(error.errno, error.strerror, str(self)) from None

    def _not_regular(self) -> NotRegular:
        return NotRegular(errno.EINVAL, "not a regular file", str(self))


def _look_into(folder: Folder, inside: str, *, lenient: bool) -> list[tuple[str, os.stat_result]]:
    found = []
    try:
        with opened(folder.open(inside, FOLDER)) as fd, os.scandir(fd) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    if not lenient:
                        raise
                    continue
                found.append((f"{inside}/{entry.name}" if inside else entry.name, status))
    except OSError:
        if not lenient:
            raise
    return found
