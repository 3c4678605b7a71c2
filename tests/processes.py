"""What the kernel says of other processes. Each of them may end at any instant: between a look and the next, and during one."""

from __future__ import annotations

import errno
from pathlib import Path


def of_process(pid: int, path: str) -> bytes:
    """Return the content of ``/proc/<pid>/<path>``; empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/{path}").read_bytes()
    except OSError as error:
        # Gone before it was opened, or, as for environ and maps of a zombie, while it was read.
        if error.errno in (errno.ENOENT, errno.ESRCH, errno.EACCES):
            return b""
        raise


def children_of(pid: int) -> list[int]:
    """Return the pids of the direct children of a process's main thread."""
    return [int(child) for child in of_process(pid, f"task/{pid}/children").split()]


def state_of(pid: int) -> str | None:
    """Return the letter of a process's state, such as ``T`` for stopped; ``None`` once it has ended, also as a zombie."""
    state = of_process(pid, "stat").rpartition(b")")[2].split()[:1]
    return None if state in ([], [b"Z"], [b"X"]) else state[0].decode()


def links_of(pid: int) -> dict[str, str]:
    """Return where each open descriptor of a process leads."""
    found = {}
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found[fd.name] = str(fd.readlink())
            except FileNotFoundError:  # closed since
                continue
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return found
