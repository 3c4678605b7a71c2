"""Objects that the store refuses: one of a step, which is passed over, or all of them, which are waited for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.daemon.services import Services
from sidecar.download import downloader as downloader_module
from sidecar.download.request import ResumeState
from sidecar.errors import StoreUnavailable
from sidecar.transfer import executor as executor_module
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import FILES, OTHERS, answer, reasons, runtime_on
from tests.process.sidecar_process import write_checkpoint


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "CAP_S", 0.1)
    monkeypatch.setattr(downloader_module, "FULL_PATIENCE_S", 1.0)
    monkeypatch.setattr(downloader_module, "SHORT_PATIENCE_S", 0.05)


@pytest.fixture
def store() -> DamagedWay:
    return DamagedWay()


def runtime_with_two_steps(store: DamagedWay, volume: Path) -> Services:
    commit_step(store, 10, OTHERS)
    commit_step(store, 20, FILES)
    store.put(keys.RUN, b"{}")
    return runtime_on(store, volume)


@pytest.mark.parametrize("key", ["/0", "/2", ".json", ".complete"])
def test_a_step_with_an_object_that_stays_refused_is_passed_over_and_tried_again(
    key: str, store: DamagedWay, tmp_path: Path
) -> None:
    async def scenario() -> None:
        services = runtime_with_two_steps(store, tmp_path / "volume")
        store.is_refused = lambda of: of.startswith("checkpoint-20/") and of.endswith(key)
        status = await answer(services)
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-10")
        assert "the object's own permissions" in reasons(status)["checkpoint-20"]
        assert [passed.may_be_whole for passed in status.passed_over] == [True]
        assert services.quarantine.quarantined == {}
        store.is_refused = lambda of: False
        assert (await answer(services)).checkpoint == "checkpoint-20"

    asyncio.run(scenario())


def test_while_everything_is_refused_no_step_is_passed_over(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        services = runtime_with_two_steps(store, tmp_path / "volume")
        ended_s = time.monotonic() + 3
        store.is_refused = lambda of: time.monotonic() < ended_s
        status = await answer(services)
        assert (status.state, status.checkpoint, status.passed_over) == (ResumeState.READY, "checkpoint-20", ())
        assert time.monotonic() > ended_s

    asyncio.run(scenario())


def test_refusals_that_end_while_a_request_is_under_way_cost_no_step(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        services = runtime_with_two_steps(store, tmp_path / "volume")
        ended_s = time.monotonic() + 3

        def is_refused(key: str) -> bool:
            # The credentials are corrected after the last refusal, before the next request.
            is_over = time.monotonic() >= ended_s
            store.is_refused = (lambda of: False) if is_over else is_refused
            return True

        store.is_refused = is_refused
        status = await answer(services)
        assert (status.state, status.checkpoint, status.passed_over) == (ResumeState.READY, "checkpoint-20", ())

    asyncio.run(scenario())


def test_refusals_after_an_outage_are_counted_from_the_first_of_them(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        services = runtime_with_two_steps(store, tmp_path / "volume")
        away_until_s, refused = time.monotonic() + 2, 0

        def is_refused(key: str) -> bool:
            nonlocal refused
            if time.monotonic() < away_until_s:
                raise StoreUnavailable("the store does not answer")
            refused += key.endswith(".complete")
            return key == "checkpoint-20/.complete" and refused <= 2  # rights that reach one server of the store later

        store.is_refused = is_refused
        status = await answer(services)
        assert (status.state, status.checkpoint, status.passed_over) == (ResumeState.READY, "checkpoint-20", ())
        assert refused > 2

    asyncio.run(scenario())


def test_a_checkpoint_on_the_volume_is_used_also_where_its_commit_stays_refused(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 20, {"model": b"mine"})
        store.put(keys.RUN, b"{}")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"model": b"mine"})
        services = runtime_on(store, tmp_path / "volume")
        await services.scanner.scan()
        store.is_refused = lambda of: of == "checkpoint-20/.complete"
        status = await answer(services)
        assert (status.state, status.checkpoint, status.source) == (ResumeState.READY, "checkpoint-20", "local")

    asyncio.run(scenario())
