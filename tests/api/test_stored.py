"""Commits that a call reads from the store."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from sidecar.api.stored import AT_ONCE, stored_checkpoints
from sidecar.core.format import keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import runtime_on


class Distant(DamagedWay):
    """Counts the commits that are read at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.commits_read: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        with self._lock:
            self.commits_read.append(key)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.02)
        with self._lock:
            self.at_once -= 1
        return super().get(key, most_bytes=most_bytes)


@pytest.mark.parametrize(
    ("before_step", "limit", "steps"),
    [
        (None, None, [*range(400, 0, -10)]),
        (None, 3, [400, 390, 380]),
        (50, None, [40, 30, 20, 10]),
        (50, 2, [40, 30]),
        (10, 5, []),
    ],
)
def test_the_newest_before_a_step_are_read_several_at_once(
    before_step: int | None, limit: int | None, steps: list[int], tmp_path: Path
) -> None:
    async def scenario() -> None:
        store = Distant()
        for step in range(10, 401, 10):
            commit_step(store, step, {"m": b"v1"})
        services = runtime_on(store, tmp_path / "volume")
        found = await stored_checkpoints(services, before_step=before_step, limit=limit)
        assert [checkpoint.step for checkpoint in found] == steps
        assert store.most_at_once <= 2 * AT_ONCE, "each is compared with a second reading"
        if len(steps) == 40:
            assert store.most_at_once > 1
        read = {key for key in store.commits_read if key.endswith(keys.commit(""))}
        assert len(read) <= (AT_ONCE if limit else len(steps))

    asyncio.run(scenario())


async def test_a_bad_checkpoint_is_listed_as_bad_with_its_reason(tmp_path: Path) -> None:
    store = Distant()
    for step in (10, 20):
        commit_step(store, step, {"m": b"v1"})
    services = runtime_on(store, tmp_path / "volume")
    services.quarantine.add("checkpoint-10", "0" * 16, "m: missing in the store")
    found = await stored_checkpoints(services)
    assert [(each.name, each.state, each.reason) for each in found] == [
        ("checkpoint-20", "committed", None),
        ("checkpoint-10", "bad", "m: missing in the store"),
    ]
