"""A volume that comes back to its run after another pod trained on another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import contents, sidecar, write_checkpoint


@ON_ONE_STORE
@pytest.mark.parametrize("names_attempt", [True, False])
def test_an_earlier_attempts_save_of_a_committed_step_is_neither_resumed_nor_sent(
    names_attempt: bool, place: Place, tmp_path: Path
) -> None:
    """It was resumed before it was compared; without an attempt in its marker, it also replaced what came later."""
    for number, at in enumerate(("here", "elsewhere")):
        settings = place.settings | {"POD_UID": f"pod-{number}", "CKPT_RESUME": "on-demand"}
        with sidecar(tmp_path / at, settings) as running:
            running.ready()
            if number:
                assert running.resume("checkpoint-10")["state"] == "ready"
            for step in (20, 30) if number else (10, 20, 30):
                marker = {"attempt": f"20260301T12000{number}Z-a"} if names_attempt else None
                write_checkpoint(running.volume, f"checkpoint-{step}", {"m": at.encode()}, marker)
                running.committed(f"checkpoint-{step}")
            assert running.terminate() == 0
    with sidecar(tmp_path / "here", place.settings | {"POD_UID": "pod-2"}) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-30"
        assert contents(running.volume / "checkpoint-30") == {"m": b"elsewhere"}
        running.ready()
        assert running.terminate() == 0
    for step in (20, 30):
        assert place.read(f"checkpoint-{step}/m") == b"elsewhere"
