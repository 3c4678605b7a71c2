"""The throughput that predictions are made of, while the store answers and while it does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidecar.errors import AccessRefused
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate

MB = 1_000_000


@pytest.fixture
def executor() -> Iterator[StoreExecutor]:
    running = StoreExecutor(concurrency=1, gate=RateGate(None), health=Health())
    yield running
    running.close()


def sends(executor: StoreExecutor, bytes_per_s: int) -> None:
    for second in range(13):
        executor.sent_rate.sample(second * bytes_per_s, now_s=float(second), busy=True)


def test_the_bytes_on_their_way_measure_the_link_before_any_has_arrived(executor: StoreExecutor) -> None:
    sends(executor, 3 * MB)
    assert executor.usual_bytes_per_s() == 3 * MB


@pytest.mark.parametrize("sent_bytes_per_s", [0, 100])
def test_a_store_that_refuses_all_says_nothing_about_the_time_of_an_upload(
    executor: StoreExecutor, sent_bytes_per_s: int
) -> None:
    executor.health.failed(AccessRefused("model: PutObject was denied"), "upload")
    sends(executor, sent_bytes_per_s)
    assert executor.usual_bytes_per_s() is None, "else an upload of 40 MB is said to take months"
    executor.count(2 * MB, began_s=0.0)
    assert executor.usual_bytes_per_s(roughly=True) == executor.sent.bytes_per_s()


def test_a_link_on_which_nothing_moves_yet_is_not_measured(executor: StoreExecutor) -> None:
    sends(executor, 0)
    assert executor.usual_bytes_per_s() is None
