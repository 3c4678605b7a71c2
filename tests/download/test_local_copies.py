"""A resume where the volume has the step of the newest commit, of another attempt."""

from __future__ import annotations

from pathlib import Path

from sidecar.core.lifecycle.states import State
from sidecar.download.request import ResumeState
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import FILES, OTHERS, answer, runtime_on
from tests.process.sidecar_process import write_checkpoint


async def test_a_step_that_a_later_attempt_has_committed_replaces_the_superseded_save_of_it(tmp_path: Path) -> None:
    """The volume of an earlier pod came back: its own save of the step was in the way, and an older step was used."""
    store, volume = DamagedWay(), tmp_path / "volume"
    commit_step(store, 10, OTHERS)
    commit_step(store, 20, FILES, attempt="b")
    services = runtime_on(store, volume)
    write_checkpoint(volume, "checkpoint-20", OTHERS, {"format": 1, "step": 20, "attempt": "a"})
    await services.inventory.scan_until_settled()
    tracked = services.catalog.get("checkpoint-20")
    assert tracked is not None
    services.catalog.move(tracked, State.SUPERSEDED, reason="the later attempt b has committed this step")
    status = await answer(services)
    assert (status.state, status.checkpoint, status.passed_over) == (ResumeState.READY, "checkpoint-20", ())
    assert {path: (volume / "checkpoint-20" / path).read_bytes() for path in FILES} == FILES


async def test_a_step_that_an_earlier_pod_left_on_the_volume_is_used_before_it_is_uploaded(tmp_path: Path) -> None:
    """A replacement on a persistent volume: an older step in the store would cost the training since."""
    store, volume = DamagedWay(), tmp_path / "volume"
    commit_step(store, 10, FILES)
    write_checkpoint(volume, "checkpoint-20", FILES, {"format": 1, "step": 20, "attempt": "a"})
    services = runtime_on(store, volume, POD_UID="the-later-pod")
    services.pod.begin()
    await services.inventory.scan_until_settled()
    tracked = services.catalog.get("checkpoint-20")
    assert tracked is not None
    assert tracked.checkpoint is not None
    assert tracked.checkpoint.is_inherited
    status = await answer(services)
    assert (status.state, status.checkpoint, status.source) == (ResumeState.READY, "checkpoint-20", "local")
