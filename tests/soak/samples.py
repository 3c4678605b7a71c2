"""What the kernel says of a process, and what lies on its volume."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.processes import links_of, of_process

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
KINDS = ("sockets", "pipes", "inotify", "other anonymous", "files")
"""Of descriptors."""


def of_memory(pid: int) -> dict[str, float]:
    """Return resident and proportional memory in MiB. Source: proc_pid_smaps(5)."""
    rollup = of_process(pid, "smaps_rollup").decode()
    fields = {line.partition(":")[0]: line.partition(":")[2].split()[0] for line in rollup.splitlines()[1:]}
    return {
        "RSS": int(fields["Rss"]) / 1024,
        "PSS": int(fields["Pss"]) / 1024,
        "anonymous memory": int(fields["Anonymous"]) / 1024,
    }


def of_descriptors(pid: int) -> dict[str, float]:
    """Return the number of open descriptors by kind, and of inotify watches."""
    links = links_of(pid)
    found = Counter(_kind(link) for link in links.values())
    watches = sum(
        of_process(pid, f"fdinfo/{fd}").count(b"inotify wd:") for fd, link in links.items() if _kind(link) == "inotify"
    )
    return {**{f"descriptors: {kind}": float(found[kind]) for kind in KINDS}, "inotify watches": float(watches)}


def _kind(link: str) -> str:
    if link.startswith("socket:"):
        return "sockets"
    if link.startswith("pipe:"):
        return "pipes"
    if link.startswith("anon_inode:"):
        return "inotify" if "inotify" in link else "other anonymous"
    return "files"


def of_processor(pid: int) -> dict[str, float]:
    """Return CPU seconds, user and system of all threads, and the number of threads. Source: proc_pid_stat(5)."""
    fields = of_process(pid, "stat").rpartition(b")")[2].split()
    return {"CPU seconds": (int(fields[11]) + int(fields[12])) * TICK_S, "threads": float(fields[17])}


def of_volume(volume: Path) -> dict[str, float]:
    """Return entries and KiB below ``.ckpt``, and of its journals. What is deleted meanwhile is left out."""
    entries, size_bytes, journal_bytes = 0, 0, 0
    for folder, _, names in os.walk(volume / ".ckpt"):
        for name in names:
            try:
                size = Path(folder, name).lstat().st_size
            except FileNotFoundError:
                continue
            entries, size_bytes = entries + 1, size_bytes + size
            journal_bytes += size if f"{folder}/".startswith(f"{volume}/.ckpt/journal/") else 0
    return {"files in .ckpt": float(entries), ".ckpt": size_bytes / 1024, "journals": journal_bytes / 1024}
