"""A resume that is interrupted at each point where it waits: by the trainer's request, and by the end of the sidecar."""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from sidecar.daemon.services import Services
from sidecar.download import range_fetcher
from sidecar.download.downloader import Downloader
from sidecar.download.request import AskedBy, ResumeState
from sidecar.download.request_worker import RequestWorker
from tests.catalog.test_volume_trouble import new_life
from tests.download.committed import commit_step
from tests.process.sidecar_process import contents
from tests.store.memory import MemoryStore

FILES = {"large": b"A" * 200, "small": b"B" * 20, "inner/small": b"C" * 20}
MOST = 200
"""No request waits more often."""


@types.coroutine
def counted(work: Coroutine[Any, Any, None], which: int, then: Callable[[], object]) -> Generator[Any, Any, bool]:
    """Await some work, and call ``then`` while it waits for the ``which``-th time. Returns whether it did."""
    waits, sent, error = 0, None, None
    while True:
        try:
            waited_for = work.send(sent) if error is None else work.throw(error)
        except StopIteration:
            return waits >= which
        waits += 1
        if waits == which:
            asyncio.get_running_loop().call_soon(then)
        sent, error = None, None
        try:
            sent = yield waited_for
        except BaseException as raised:
            error = raised


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(range_fetcher, "LARGE_BYTES", 100)
    committed = MemoryStore()
    for step in (10, 20):
        commit_step(committed, step, {path: content + b"%d" % step for path, content in FILES.items()})
    return committed


def started(volume: Path, store: MemoryStore) -> Services:
    services = new_life(volume)
    services.store_reader.opened(Downloader(store, services.volume, services.executor))
    services.store_reader.grant()
    return services


async def interrupted(
    services: Services, which: int, then: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> tuple[str | None, bool]:
    """Have a person ask for a step, and interrupt the work. Returns the request's id, and whether the work waited so often."""
    real, over = RequestWorker.answer, asyncio.Event()
    reached = False

    async def answer(self: RequestWorker, request: Any) -> None:
        nonlocal reached
        monkeypatch.setattr(RequestWorker, "answer", real)
        try:
            reached = await counted(real(self, request), which, then)
        except asyncio.CancelledError:
            reached = True
            raise
        finally:
            over.set()

    monkeypatch.setattr(RequestWorker, "answer", answer)
    asked = services.resume_service.request("checkpoint-10", asked_by=AskedBy.PERSON)
    await over.wait()
    return asked.id, reached


def expect(volume: Path, *steps: int) -> None:
    for step in steps:
        found = contents(volume / f"checkpoint-{step}")
        assert found == {path: content + b"%d" % step for path, content in FILES.items()}
    assert list((volume / ".ckpt/incoming").iterdir()) == []


def test_the_trainers_request_interrupts_that_of_a_person_and_both_are_answered(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def life(which: int) -> bool:
        services = started(volume := tmp_path / str(which), store)
        service, trainers = services.resume_service, list[Any]()

        def ask() -> None:
            trainers.append(service.request("checkpoint-20", asked_by=AskedBy.TRAINER).id)

        persons, reached = await interrupted(services, which, ask, monkeypatch)
        await asyncio.sleep(0)
        for identifier, name in [*((each, "checkpoint-20") for each in trainers), (persons, "checkpoint-10")]:
            answer = await service.progress(identifier, timeout_s=20)
            assert answer is not None
            assert (answer.state, answer.checkpoint) == (ResumeState.READY, name), (which, answer)
        expect(volume, 10, *(20 for _ in trainers))
        services.executor.close()
        return reached

    for which in itertools.count(1):
        assert which < MOST
        if not asyncio.run(asyncio.wait_for(life(which), 60)):
            break
    assert which > 5


def test_what_the_end_of_the_sidecar_interrupts_is_downloaded_by_the_next_one(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(which: int) -> bool:
        services = started(tmp_path / str(which), store)
        _, reached = await interrupted(services, which, services.resume_service.close, monkeypatch)
        services.resume_service.close()
        late = services.resume_service.request("checkpoint-20", asked_by=AskedBy.TRAINER)
        await asyncio.sleep(0.01)
        shown = services.resume_service.status(late.id)
        assert shown is not None
        assert shown.state in (ResumeState.IDLE, ResumeState.CHOOSING), "it begins none any more"
        services.executor.close()
        return reached

    async def second(which: int) -> None:
        services = started(tmp_path / str(which), store)
        asked = services.resume_service.request("checkpoint-10", asked_by=AskedBy.TRAINER)
        answer = await services.resume_service.progress(asked.id, timeout_s=20)
        assert answer is not None
        assert (answer.state, answer.checkpoint) == (ResumeState.READY, "checkpoint-10")
        services.executor.close()

    for which in itertools.count(1):
        assert which < MOST
        reached = asyncio.run(asyncio.wait_for(first(which), 60))
        asyncio.run(asyncio.wait_for(second(which), 60))
        expect(tmp_path / str(which), 10)
        if not reached:
            break
    assert which > 5
