"""Connections that a load balancer ends after a while, in the middle of each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sidecar.download.request import ResumeState
from sidecar.errors import StoreUnavailable
from sidecar.store.protocol import Readable
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import answer, runtime_on
from tests.process.sidecar_process import contents

MIB = 1 << 20


class ShortConnections(DamagedWay):
    """Gives out at most a MiB per request."""

    @contextmanager
    def read(self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None) -> Iterator[Readable]:
        with super().read(key, offset=offset, length=length, etag=etag) as body:
            yield _Ending(body)


class _Ending:
    def __init__(self, body: Readable) -> None:
        self._body = body
        self._left = MIB

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._left:
            raise StoreUnavailable("the answer ended early")
        count = self._body.readinto(buffer[: self._left])
        self._left -= count
        return count


def test_a_range_continues_where_the_connection_before_ended(tmp_path: Path) -> None:
    files = {"model": bytes(range(256)) * (3 * MIB // 256) + b"end"}

    async def scenario() -> None:
        store = ShortConnections()
        commit_step(store, 10, files)
        status = await answer(runtime_on(store, tmp_path / "volume"))
        assert (status.state, status.passed_over) == (ResumeState.READY, ())
        assert contents(tmp_path / "volume/checkpoint-10") == files
        assert store.reads < 20

    asyncio.run(scenario())
