"""Checkpoints under another prefix than the one that they were written to, or without the claims that it had."""

from __future__ import annotations

from pathlib import Path

from sidecar.core.format import keys
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import sidecar, write_checkpoint

pytestmark = ON_ONE_STORE


def test_a_step_that_is_trained_again_replaces_one_that_was_copied_from_a_prefix_with_a_higher_epoch(
    place: Place, tmp_path: Path
) -> None:
    """Only the checkpoints were copied, or the claims deleted: each new save of a step counted as an earlier pod's."""
    for epoch in (1, 2, 3):
        with sidecar(tmp_path / f"earlier-{epoch}", place.settings) as running:
            write_checkpoint(running.ready().volume, f"checkpoint-{epoch}0", {"m": b"old"})
            running.committed(f"checkpoint-{epoch}0")
            assert running.terminate() == 0
    place.store.delete([keys.RUN, *place.keys(keys.CLAIMS)])
    with sidecar(tmp_path / "present", place.settings | {"CKPT_RESUME": "on-demand"}) as running:
        assert running.ready().resume("checkpoint-10")["state"] == "ready"
        for step in (20, 30):
            write_checkpoint(running.volume, f"checkpoint-{step}", {"m": b"new"})
            running.committed(f"checkpoint-{step}")
        assert running.terminate() == 0
    with sidecar(tmp_path / "later", place.settings) as running:
        assert running.ready().resume()["checkpoint"] == "checkpoint-30"
        assert (running.volume / "checkpoint-30/m").read_bytes() == b"new"
