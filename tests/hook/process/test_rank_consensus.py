"""How long a rank waits for another, and what becomes of a job whose ranks cannot reach each other any more."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import PATIENCE_S, ROOT, plain_environ
from tests.lazy import LazyModule
from trainer_hook.process import log
from trainer_hook.process.rank_consensus import MAX_TIMEOUT_S, MIN_TIMEOUT_S, RankConsensus, RanksUnreachable, Vote, World

dist = LazyModule("torch.distributed")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[datetime.timedelta]]:
    """The timeouts of the groups that the hook makes, in a group that is said to have two ranks."""
    timeouts: list[datetime.timedelta] = []

    def new_group(*, backend: str, timeout: datetime.timedelta) -> str:
        timeouts.append(timeout)
        return backend

    monkeypatch.setattr(log, "_set_rank", [])
    monkeypatch.setattr("torch.distributed.new_group", new_group)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    yield timeouts
    if dist.is_initialized():
        dist.destroy_process_group()


def consensus(folder: Path, *, hours: float) -> RankConsensus:
    timeout = datetime.timedelta(hours=hours)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1, timeout=timeout)
    return RankConsensus(timeout_s=60)


@pytest.mark.parametrize(("hours", "waits_s"), [(0.01, MIN_TIMEOUT_S), (3, 3 * 3600.0), (24 * 1000, MAX_TIMEOUT_S)])
def test_a_rank_waits_as_long_as_the_scripts_own_group(
    hours: float, waits_s: float, tmp_path: Path, made: list[datetime.timedelta]
) -> None:
    one = consensus(tmp_path, hours=hours)
    one.new_group()
    assert [timeout.total_seconds() for timeout in made] == [waits_s, waits_s]


def test_a_group_without_a_readable_timeout_leaves_the_hooks_own(
    tmp_path: Path, made: list[datetime.timedelta], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.ProcessGroup, "_device_types", None)
    consensus(tmp_path, hours=3)
    assert [timeout.total_seconds() for timeout in made] == [MIN_TIMEOUT_S]


@pytest.mark.parametrize(("local_ranks", "nodes"), [(("0", "1"), 1), (("0", "0"), 2)])
def test_a_local_world_size_that_no_launcher_has_set_makes_no_further_nodes(
    local_ranks: tuple[str, ...], nodes: int, tmp_path: Path, made: list[datetime.timedelta], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs accelerate sets 1 by itself: two ranks of one volume were on nodes of their own."""

    def all_gather_object(places: list[Any], _: Any, *, group: Any) -> None:
        places[:] = [("host", local_rank) for local_rank in local_ranks]

    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather_object)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert consensus(tmp_path, hours=1).world.nodes == nodes


def test_training_does_not_go_on_without_saves(
    tmp_path: Path, made: list[datetime.timedelta], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would go on to its end, and fail there at its last save."""
    one = consensus(tmp_path, hours=1)

    def timed_out(values: list[float]) -> list[float]:
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

    monkeypatch.setattr(one, "_reduce", timed_out)
    with pytest.raises(RanksUnreachable, match="nothing could be saved any more"):
        one.tick("train", Vote)
    assert "another rank cannot be reached (Timed out" in capsys.readouterr().err


RANK = """
import datetime, os, pathlib, sys, time
import torch.distributed as dist
from trainer_hook.process.rank_consensus import RankConsensus

rank, folder, late_s = int(sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3])
(folder / f"imported-{rank}").touch()
while len(list(folder.glob("imported-*"))) < 2:
    time.sleep(0.05)
limit = datetime.timedelta(seconds=5)
dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2, timeout=limit)
if rank == 1:
    time.sleep(abs(late_s))
    if late_s < 0:
        os._exit(7)
print(RankConsensus().world.size)
"""


def ranks(folder: Path, *, late_s: float) -> list[tuple[int, str]]:
    """Return exit code and output of two ranks, of which the second comes late, or, where ``late_s`` is negative, dies."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder), str(late_s)],
            env=plain_environ() | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
def test_a_rank_that_died_before_training_is_not_waited_for(tmp_path: Path) -> None:
    """The other one waited half an hour for it in the store, where without the hook its first collective fails at once."""
    (code, said), (died, _) = ranks(tmp_path, late_s=-0.5)
    assert (code, died) == (1, 7), said
    assert "another rank cannot be reached" in said


@pytest.mark.slow
def test_a_rank_may_come_later_than_the_scripts_own_timeout(tmp_path: Path) -> None:
    """Without the hook it would be in time, because nobody waits for it before the first collective of training."""
    assert ranks(tmp_path, late_s=7) == [(0, "2\n"), (0, "2\n")]


def test_a_group_that_was_destroyed_leaves_a_single_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/first", rank=0, world_size=1)
    one = RankConsensus()
    one.world, one.group = World(1, 2, 0, 1, (0, 1)), "of two ranks"
    assert not one.rejoin(), "it is the same"
    dist.destroy_process_group()
    assert one.rejoin()
    assert (one.world, one.all_agree(True), one.from_rank_0("x")) == (World(), True, "x")
    assert not one.rejoin()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/second", rank=0, world_size=1)
    assert one.rejoin()
    assert not one.rejoin()
    dist.destroy_process_group()
