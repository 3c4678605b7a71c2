"""A checkpoint is finished when every local rank has written; a folder of other files is not replaced."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hook.volume.test_publish import names
from trainer_hook.contract import MARKER, SYSTEM_DIR
from trainer_hook.volume.rank_records import RankRecords


def records(volume: Path, *, ranks: int, attempt: str = "a") -> list[RankRecords]:
    (volume / ".ckpt/ranks").mkdir(parents=True, exist_ok=True)
    return [RankRecords(volume, attempt=attempt, rank=rank, local_ranks=ranks) for rank in range(ranks)]


@given(st.permutations(range(4)))
def test_the_last_rank_to_write_finishes_whatever_the_order(order: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        every = records(Path(folder), ranks=4)
        assert [every[rank].record_part("checkpoint-5") for rank in order] == [False, False, False, True]
        every[0].clear("checkpoint-5")
        assert names(Path(folder) / ".ckpt/ranks") == []


def test_of_ranks_that_write_at_the_same_time_exactly_one_finishes(volume: Path) -> None:
    every = records(volume, ranks=4)
    with ThreadPoolExecutor(4) as ranks:
        for step in range(100):
            barrier = threading.Barrier(4)

            def wrote(rank: RankRecords, name: str, together: threading.Barrier) -> bool:
                together.wait()
                return rank.record_part(name)

            asked = [ranks.submit(wrote, rank, f"checkpoint-{step}", barrier) for rank in every]
            assert sorted(future.result() for future in asked) == [False, False, False, True]


def test_a_lone_rank_leaves_no_record(volume: Path) -> None:
    [only] = records(volume, ranks=1)
    assert only.record_part("checkpoint-5")
    assert names(volume / ".ckpt/ranks") == []


def test_records_of_another_attempt_or_another_step_or_of_nonsense_do_not_count(volume: Path) -> None:
    records(volume, ranks=2, attempt="earlier")[1].record_part("checkpoint-5")
    first, second = records(volume, ranks=2)
    assert not first.record_part("checkpoint-5")
    assert not second.record_part("checkpoint-50")
    for nonsense in (b"{", b"[]", b"\xff"):
        (volume / ".ckpt/ranks/checkpoint-5.7.done").write_bytes(nonsense)
        assert not first.record_part("checkpoint-5")
    first.clear("checkpoint-5")
    assert [path.name for path in (volume / ".ckpt/ranks").iterdir()] == ["checkpoint-50.1.done"]


def test_a_folder_is_replaced_that_was_begun_by_the_hook_or_is_finished_or_empty(volume: Path) -> None:
    [rank] = records(volume, ranks=1)
    folder = volume / "final"
    assert rank.may_replace(folder)
    folder.mkdir()
    assert rank.may_replace(folder)
    (folder / "notes").touch()
    assert not rank.may_replace(folder)
    (folder / MARKER).touch()
    assert rank.may_replace(folder)
    (folder / MARKER).unlink()
    shutil.rmtree(volume / SYSTEM_DIR)  # by a script that empties its output folder
    rank.begin("final")
    assert rank.may_replace(folder)
    rank.end("final")
    assert not rank.may_replace(folder)


@pytest.mark.parametrize("content", [b"[]", b"5", b'{"attempt": ["a"]}', b"[" * 100_000, b"{"])
def test_a_record_of_another_form_is_not_of_this_attempt(content: bytes, volume: Path) -> None:
    first, second = records(volume, ranks=2)
    (volume / ".ckpt/ranks/checkpoint-5.7.done").write_bytes(content)
    assert [first.record_part("checkpoint-5"), second.record_part("checkpoint-5")] == [False, True]
