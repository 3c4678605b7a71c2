"""At a limit of processes, work waits for the threads that are there, and nothing fails."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from sidecar.daemon.exit_report import write_in_time
from sidecar.errors import StoreUnavailable
from sidecar.store.s3.loop import LoopThread
from sidecar.thread_pool import ThreadPool
from sidecar.volume.volume import Volume
from tests.upload.parts import executor


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel grant no further thread."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_work_waits_for_a_thread_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPool(8, "test") as pool:
        refuse_threads(monkeypatch)
        assert [work.result(10) for work in [pool.submit(abs, -number) for number in range(20)]] == list(range(20))


def test_a_pool_without_a_thread_says_so_and_begins_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        pool = ThreadPool(8, "test")
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(abs, -1)
    assert pool.submit(abs, -2).result(10) == 2
    pool.shutdown()


async def test_requests_go_on_beside_training_and_when_the_pod_terminates(monkeypatch: pytest.MonkeyPatch) -> None:
    with executor(concurrency=4) as running:
        refuse_threads(monkeypatch)
        assert await asyncio.gather(*(running.once(abs, -number) for number in range(9))) == list(range(9))
        running.hurry()
        assert await asyncio.gather(*(running.once(abs, -number) for number in range(9))) == list(range(9))


async def test_the_exit_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPool(None, "test"))
    volume = Volume(tmp_path)
    volume.prepare()
    nothing = {"exit_code": 0, "newest_durable_step": 20, "durable": ["checkpoint-20"], "given_up": [], "newest_rejected": {}}
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        more = {"unfinished": {}, "unseen": None, "fenced": None, "grace_used_s": None, "nothing_saved": False}
        await write_in_time(volume, nothing | more)
    assert json.loads((tmp_path / ".ckpt/exit-report.json").read_text())["newest_durable_step"] == 20


def test_a_store_whose_first_request_had_no_thread_answers_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer() -> int:
        return 7

    loop = LoopThread()
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(StoreUnavailable, match="podPidsLimit"):
            loop.run(answer())
    assert loop.run(answer()) == 7
    loop.close()
