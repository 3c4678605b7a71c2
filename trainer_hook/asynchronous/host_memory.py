"""Memory that this process may still allocate, by the machine and by its cgroups (version 1 or 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer_hook.asynchronous.writer_process import WRITER_BYTES

UNLIMITED = 1 << 62
"""Version 1 expresses "no limit" as a number close to 2**63."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Free memory below one limit."""

    available_bytes: int
    where: str


def memory_shortage(size_bytes: int, *, held_bytes: int, limit: Limit, ranks: int = 1) -> str | None:
    """Return why a snapshot does not fit into the host's memory; ``None``: it fits.

    ``held_bytes``: already allocated for snapshots; if it is not 0, the writer process runs already. ``ranks``: ranks of this
    node that allocate about as much at the same time.
    """
    needed = ranks * (max(0, size_bytes - held_bytes) + (0 if held_bytes else WRITER_BYTES))
    if size_bytes <= held_bytes or needed <= limit.available_bytes:
        return None
    what = "a snapshot needs" if ranks == 1 else f"snapshots of {ranks} ranks need"
    return f"{what} {needed:,} bytes more of the memory {limit.where}, {max(0, limit.available_bytes):,} are free"


def available(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Limit:
    """Return the tightest limit of this process. A limit that cannot be read is ignored.

    Inactive page cache counts as free, as in the kubelet's ``working_set``.
    """
    meminfo = _statistics(proc / "meminfo")
    free_bytes = 1024 * meminfo["MemAvailable:"] if "MemAvailable:" in meminfo else UNLIMITED
    limits = [Limit(free_bytes, "of the machine"), *_of_cgroups(proc, cgroups)]
    return min(limits, key=lambda limit: limit.available_bytes)


def _of_cgroups(proc: Path, cgroups: Path) -> Iterator[Limit]:
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (cgroups, cgroups / "unified"):
                yield from _below(root, path, limit="memory.max", used="memory.current", idle="inactive_file")
        elif "memory" in controllers.split(","):
            names = {"limit": "memory.limit_in_bytes", "used": "memory.usage_in_bytes", "idle": "total_inactive_file"}
            yield from _below(cgroups / "memory", path, **names)


def _below(root: Path, path: str, *, limit: str, used: str, idle: str) -> Iterator[Limit]:
    # In a container the path may be that of the host, which is not mounted: the container's group is the root of the mount.
    inside = PurePosixPath(path).relative_to("/") if path.startswith("/") else PurePosixPath(path)
    for group in (inside, *inside.parents):
        folder = root / group
        most, now = _number(_text(folder / limit)), _number(_text(folder / used))
        if most is not None and now is not None and most < UNLIMITED:
            yield Limit(most - now + _statistics(folder / "memory.stat").get(idle, 0), "of the container")


def _statistics(path: Path) -> Mapping[str, int]:
    fields = (line.split() for line in _text(path).splitlines())
    return {field[0]: int(field[1]) for field in fields if len(field) > 1 and field[1].isdigit()}


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
