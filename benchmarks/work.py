"""Files that the benchmarks transfer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
KINDS = ("big", "four", "small", "hf")
SMALL_FILES, SMALL_BYTES = 200, 4 << 10


def prepare(kind: str, folder: Path, *, mib: int) -> None:
    """Fill a new folder; contents do not compress."""
    folder.mkdir(parents=True)
    if kind == "hf":
        subprocess.run([sys.executable, "-m", "benchmarks.hf_checkpoint", str(folder), str(mib)], check=True)
    elif kind == "small":
        for number in range(SMALL_FILES):
            write_random(folder / f"file-{number:03}", SMALL_BYTES)
    else:
        count = {"big": 1, "four": 4}[kind]
        for number in range(count):
            write_random(folder / f"shard-{number}.bin", mib * MIB // count)


def write_random(path: Path, size_bytes: int) -> None:
    """Write a file of random bytes."""
    with path.open("wb") as file:
        for offset in range(0, size_bytes, MIB):
            file.write(os.urandom(min(MIB, size_bytes - offset)))


def write_checkpoint(folder: Path, size_bytes: int) -> None:
    """Fill a new folder as a Trainer saves, in its order: weights, an optimizer of twice their size, small files."""
    folder.mkdir(parents=True)
    names = (
        "1-config.json",
        "2-model.safetensors",
        "3-optimizer.pt",
        "4-scheduler.pt",
        "5-rng_state.pth",
        "6-trainer_state.json",
    )
    sizes = {names[1]: size_bytes // 3, names[2]: size_bytes - size_bytes // 3}
    for name in names:
        write_random(folder / name, sizes.get(name, 2 << 10))


def save_paced(source: Path, target: Path, *, mb_per_s: float) -> None:
    """Write a copy of a checkpoint, file by file, as fast as a Trainer saves."""
    target.mkdir(parents=True)
    began_s, written = time.monotonic(), 0
    for path in sorted(source.iterdir()):
        with path.open("rb") as read, (target / path.name).open("wb") as write:
            while block := read.read(MIB):
                write.write(block)
                written += len(block)
                time.sleep(max(0.0, began_s + written / (mb_per_s * 1e6) - time.monotonic()))


def touch_memory(folder: Path, size_bytes: int) -> None:
    """Allocate and free memory, so that no measured process pays for pages that the virtual machine never had."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(0, size_bytes, MIB):
            file.write(bytes(MIB))


def size_bytes(folder: Path) -> int:
    """Return the bytes in all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def difference(want: Path, got: Path) -> str:
    """Return a text about the first file that is missing or different in ``got``; empty if all are equal."""
    for path in (path for path in want.rglob("*") if path.is_file()):
        name = path.relative_to(want)
        if not (got / name).is_file():
            return f"{name} is missing"
        if subprocess.run(["cmp", "-s", str(path), str(got / name)], check=False).returncode:
            return f"{name} is not what was uploaded"
    return ""


def memory_folder(size_bytes: int) -> Path:
    """Return a folder in memory if source, stored copy and download fit there; else a temporary folder."""
    shared = Path("/dev/shm")
    is_roomy = shared.is_dir() and shutil.disk_usage(shared).free > 4 * size_bytes
    return shared if is_roomy else Path(tempfile.gettempdir())
