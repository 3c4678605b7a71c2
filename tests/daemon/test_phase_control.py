"""What a decision about the phase costs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.daemon.phase_control import PhaseControl
from tests.catalog.test_volume_trouble import new_life


def test_a_volume_without_leases_is_not_walked_while_the_pod_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was walked five times a second: an unfinished checkpoint of 20,000 files took half of the event loop's time."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_MODE="classic")
        control, walks = PhaseControl(services), 0

        def unfinished() -> dict[str, float]:
            nonlocal walks
            walks += 1
            return {}

        monkeypatch.setattr(services.volume, "unfinished", unfinished)
        await control._next_phase()
        assert not walks
        services.termination.notice("api")
        await control._next_phase()
        assert walks

    asyncio.run(scenario())
