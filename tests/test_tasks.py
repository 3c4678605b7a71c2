"""Tasks that run as long as the sidecar."""

from __future__ import annotations

import pytest

from sidecar import tasks


async def test_a_service_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RESTART_AFTER_S", 0.0)
    lives = 0

    async def service() -> None:
        nonlocal lives
        lives += 1
        if lives == 3:
            raise KeyboardInterrupt  # the test's way out
        raise OSError(116, "Stale file handle")

    with pytest.raises(KeyboardInterrupt):
        await tasks.run_forever("service", service)
