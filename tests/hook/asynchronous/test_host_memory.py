"""The memory that a snapshot may take: the narrowest limit of machine and container."""

from __future__ import annotations

from pathlib import Path

from trainer_hook.asynchronous import host_memory
from trainer_hook.asynchronous.host_memory import Limit


def cgroup(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_narrowest_limit_counts_whichever_group_has_it(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    (proc / "self/cgroup").write_text("0::/pod/container\n")
    assert host_memory.available(proc=proc, cgroups=groups) == Limit(5_120_000, "of the machine")
    cgroup(groups / "pod", memory__max="3000000\n", memory__current="1000000\n", memory__stat="inactive_file 500000\nfile 9\n")
    cgroup(groups / "pod/container", memory__max="max\n", memory__current="900000\n")
    assert host_memory.available(proc=proc, cgroups=groups) == Limit(2_500_000, "of the container")


def test_version_1_is_understood_also_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("5:cpu:/\n4:memory:/kubepods/abc\n0::/\n")
    stat = "total_inactive_file 7\n"
    cgroup(groups / "memory", memory__limit_in_bytes="1000\n", memory__usage_in_bytes="400\n", memory__stat=stat)
    assert host_memory.available(proc=proc, cgroups=groups) == Limit(607, "of the container")
    (groups / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_memory.available(proc=proc, cgroups=groups).available_bytes == host_memory.UNLIMITED


def test_the_limits_of_this_machine_can_be_read() -> None:
    assert 0 < host_memory.available().available_bytes < 1 << 50
