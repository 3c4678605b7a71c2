"""Connections of a whole life that go silent, one by one: each costs moments, and nothing is lost."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.faults.bucket import MIB, Bucket, random_bytes
from tests.faults.plan import Fault, Kind
from tests.faults.proxy import Exchange, FaultProxy
from tests.faults.wire import Peer
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

NAME = "checkpoint-7"
BOUND_S = 55.0
"""Less than a single silent connection costs that is waited for; here are several, and the machine may be busy."""
LIVES = [
    (Kind.SILENT_CONNECTION, (1, 4, 8)),
    (Kind.SILENT_REQUEST, (2, 5, 9)),
    (Kind.SILENT_ANSWER, (1, 3, 6, 10)),
    (Kind.SILENT_UPLOAD, (2, 4, 6, 8)),
    (Kind.SILENT_WHEN_KEPT, (1, 2, 3, 4, 5)),
]


@functools.cache
def files() -> Mapping[str, bytes]:
    return {"model.safetensors": random_bytes(20 * MIB, 7)} | {f"small/{n}": random_bytes(1000, n) for n in range(10)}


def with_silences(bucket: Bucket, kind: Kind, connections: Iterable[int]) -> FaultProxy:
    proxy = FaultProxy(bucket.endpoint)
    proxy.silences = dict.fromkeys(connections, kind)
    return proxy


@pytest.mark.parametrize(("kind", "connections"), LIVES, ids=[kind.value for kind, _ in LIVES])
@pytest.mark.slow
def test_silent_connections_cost_a_life_moments_from_the_start_to_a_resume(
    kind: Kind, connections: tuple[int, ...], moto_bucket: Bucket, tmp_path: Path
) -> None:
    volume, began_s = tmp_path / "volume", time.monotonic()
    proxy = with_silences(moto_bucket, kind, connections)
    with proxy.running() as endpoint, sidecar(volume, moto_bucket.settings(endpoint) | {"CKPT_RESUME": "off"}) as running:
        write_checkpoint(volume, NAME, files())
        running.committed(NAME)
        assert running.terminate() == 0
    assert time.monotonic() - began_s < BOUND_S
    assert proxy.silenced
    moto_bucket.assert_holds(NAME, files())
    assert moto_bucket.unfinished_uploads() == []
    down = Kind.SILENT_DOWNLOAD if kind is Kind.SILENT_UPLOAD else kind
    proxy, began_s = with_silences(moto_bucket, down, connections), time.monotonic()
    volume = tmp_path / "new-volume"
    with proxy.running() as endpoint, sidecar(volume, moto_bucket.settings(endpoint)) as running:
        answer = running.up().resume()
        assert (answer["checkpoint"], answer["source"]) == (NAME, "store"), answer
    assert time.monotonic() - began_s < BOUND_S
    assert proxy.silenced
    assert contents(volume / NAME) == files()


@pytest.mark.slow
@pytest.mark.parametrize("connection", range(1, 11))
def test_each_of_the_first_connections_may_go_silent(connection: int, plain_bucket: Bucket, tmp_path: Path) -> None:
    kind = (Kind.SILENT_CONNECTION, Kind.SILENT_REQUEST, Kind.SILENT_ANSWER)[connection % 3]
    proxy, began_s = with_silences(plain_bucket, kind, [connection]), time.monotonic()
    with proxy.running() as endpoint:
        with sidecar(tmp_path / "volume", plain_bucket.settings(endpoint)) as running:
            write_checkpoint(running.volume, NAME, files())
            running.committed(NAME)
            assert running.terminate() == 0
        plain_bucket.assert_holds(NAME, files())
        # The life above makes about ten connections on an idle machine; the next one goes on counting.
        with sidecar(tmp_path / "new-volume", plain_bucket.settings(endpoint)) as running:
            answer = running.up().resume()
            assert (answer["checkpoint"], answer["source"]) == (NAME, "store"), answer
    assert proxy.silenced
    assert time.monotonic() - began_s < BOUND_S
    assert contents(tmp_path / "new-volume" / NAME) == files()


@pytest.mark.parametrize("kind", [Kind.SILENT_CONNECTION, Kind.SILENT_ANSWER])
def test_the_newest_checkpoint_is_committed_before_a_deadline_over_silent_connections(
    kind: Kind, moto_bucket: Bucket, tmp_path: Path
) -> None:
    proxy = with_silences(moto_bucket, kind, (2, 4, 6, 8))
    with proxy.running() as endpoint:
        settings = moto_bucket.settings(endpoint) | {"CKPT_GRACE_SECONDS": "25", "CKPT_RESUME": "off"}
        with sidecar(tmp_path / "volume", settings) as running:
            running.up()
            write_checkpoint(running.volume, NAME, files())
            until(lambda: NAME in {found["name"] for found in running.call("GET", "/v1/checkpoints").get("checkpoints", ())})
            assert running.terminate() == 0
    assert proxy.silenced
    moto_bucket.assert_holds(NAME, files())


class CutProxy(FaultProxy):
    """All connections that there are during a cut stay silent for ever, as behind a NAT or a load balancer that forgot them."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._dead, self._is_cut = 0, False

    def cut(self, length_s: float) -> None:
        self._is_cut = True
        time.sleep(length_s)
        self._dead, self._is_cut = len(self._threads), False

    def _exchange(self, client: Peer, exchange: Exchange) -> bool:
        self._stay_silent(exchange)
        is_kept = super()._exchange(client, exchange)
        self._stay_silent(exchange)
        return is_kept

    def _stay_silent(self, exchange: Exchange) -> None:
        if self._is_cut or exchange.connection <= self._dead:
            self._fall_silent(exchange.connection, Fault(Kind.SILENT_ANSWER))


@pytest.mark.slow
@pytest.mark.parametrize("length_s", [2.0, 5.0, 15.0])
def test_after_a_cut_in_which_all_connections_died_a_run_goes_on_within_moments(
    length_s: float, moto_bucket: Bucket, tmp_path: Path
) -> None:
    """Each of two requests had one silent hedge, and waited for the other's place: a minute after five seconds."""
    proxy, over, steps = CutProxy(moto_bucket.endpoint), threading.Event(), list[int]()

    def train(volume: Path) -> None:
        while not over.wait(0.4):
            step = 10 * (len(steps) + 1)
            write_checkpoint(volume, f"checkpoint-{step}", {"a": b"a" * 50_000, "b/c": b"c" * 3000})
            steps.append(step)

    with proxy.running() as endpoint, sidecar(tmp_path / "volume", moto_bucket.settings(endpoint)) as running:
        trainer = threading.Thread(target=train, args=(running.ready().volume,))
        trainer.start()
        until(lambda: running.events("checkpoint_committed"))
        proxy.cut(length_s)
        healed_s, last = time.monotonic(), steps[-1]
        until(lambda: any(event["step"] >= last for event in running.events("checkpoint_committed")), timeout_s=90)
        took_s = time.monotonic() - healed_s
        over.set()
        trainer.join()
    assert proxy.silenced
    assert took_s < BOUND_S / 2
