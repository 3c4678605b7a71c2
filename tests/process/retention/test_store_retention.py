"""What the store keeps while steps are damaged, hit by late requests, or left behind by a run that went back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import keys
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint

pytestmark = ON_ONE_STORE


def settings_of(place: Place, *, node: tuple[int, int] = (0, 1), keep: int | None = None) -> dict[str, str]:
    kept = {} if keep is None else {"CKPT_KEEP_STORE": str(keep)}
    of_node = {"CKPT_NODE_INDEX": str(node[0]), "CKPT_NODE_COUNT": str(node[1])}
    return place.settings | of_node | kept | {"CKPT_RESUME": "on-demand"}


def write(running: Sidecar, step: int, *, attempt: str = "20270115T080000Z-a", more: Mapping[str, Any] | None = None) -> None:
    files = {f"part-{running.volume.name}": f"step {step}".encode()}
    write_checkpoint(running.volume, f"checkpoint-{step}", files, {"attempt": attempt} | dict(more or {}))


def committed(place: Place) -> set[int]:
    folders = place.store.list_folders()
    names = [name for name in folders if keys.commit(name) in place.keys(keys.commit(name))]
    return {int(name.removeprefix("checkpoint-")) for name in names}


@pytest.mark.slow
def test_a_step_that_is_damaged_pushes_nothing_out_and_every_node_knows_of_it(place: Place, tmp_path: Path) -> None:
    with (
        sidecar(tmp_path / "0", settings_of(place, node=(0, 2))) as first,
        sidecar(tmp_path / "1", settings_of(place, node=(1, 2))) as second,
    ):
        for step in (300, 400):
            for running in (first.ready(), second.ready()):
                write(running, step)
            first.committed(f"checkpoint-{step}")
    place.store.put("checkpoint-400/part-1", b"STEP 400")
    later = "20270115T090000Z-b"
    # Node 0 resumes from 300, which therefore stays.
    with (
        sidecar(tmp_path / "new/0", settings_of(place, node=(0, 2), keep=1)) as first,
        sidecar(tmp_path / "new/1", settings_of(place, node=(1, 2), keep=1)) as second,
    ):
        assert first.ready().resume()["checkpoint"] == "checkpoint-300"
        [found] = until(lambda: place.keys("checkpoint-400/.ckpt/quarantined-"))
        assert json.loads(place.store.get(found))["node"] == "0"
        answer = second.ready().resume()
        assert answer["checkpoint"] == "checkpoint-300"
        assert "found by node 0" in answer["passed_over"][0]["reason"]
        assert [event["checkpoint"] for event in second.events("resume_download_started")] == ["checkpoint-300"]
        for step in (310, 320):
            for running in (first, second):
                write(running, step, attempt=later)
            for running in (first, second):
                running.committed(f"checkpoint-{step}")
            assert {300, 400, step} <= committed(place)
        until(lambda: committed(place) == {300, 320, 400}, what=lambda: f"{committed(place)}; {first.log()[-3000:]}")
        assert found in place.keys("checkpoint-400/"), "it stands as long as its commit"
        assert {event["checkpoint"] for event in second.events("store_checkpoint_deleted")} == set()
    with sidecar(tmp_path / "third", settings_of(place, keep=1)) as running:
        assert running.ready().resume()["checkpoint"] == "checkpoint-320"


@pytest.mark.slow
def test_the_only_copy_goes_only_for_one_that_stands_after_late_requests(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", settings_of(place, keep=1)) as running:
        running.ready()
        write(running, 10)
        running.committed("checkpoint-10")
        write(running, 20)
        running.committed("checkpoint-20")
        place.store.put("checkpoint-20/part-0", b"STEP 20")  # of a pod that outlived its attempt
        until(lambda: len([e for e in running.events("checkpoint_committed") if e["checkpoint"] == "checkpoint-20"]) == 2)
        assert committed(place) == {10, 20}
        until(lambda: committed(place) == {20}, what=lambda: running.log()[-3000:])
        until(lambda: not place.keys("checkpoint-10/"), what="its data goes after its commit")
    with sidecar(tmp_path / "new", settings_of(place)) as running:
        assert running.ready().resume()["checkpoint"] == "checkpoint-20"
        assert contents(running.volume / "checkpoint-20") == {"part-0": b"step 20"}


@pytest.mark.slow
def test_a_run_that_went_back_keeps_what_it_saves_now(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", settings_of(place)) as running:
        running.ready()
        for step in (200, 300, 400):
            write(running, step)
            running.committed(f"checkpoint-{step}")
    later = "20270115T090000Z-b"
    with sidecar(tmp_path / "new", settings_of(place, keep=2)) as running:
        assert running.ready().resume("checkpoint-200")["checkpoint"] == "checkpoint-200"
        for step in (210, 220, 230):
            write(running, step, attempt=later)
            running.committed(f"checkpoint-{step}")
            assert step in committed(place)
        until(lambda: committed(place) == {200, 220, 230, 300, 400}, what=lambda: f"{committed(place)} {running.log()[-3000:]}")
        [kept] = until(lambda: [e for e in running.events("store_checkpoint_kept") if e["checkpoint"] == "checkpoint-200"])
        assert kept["reason"] == "the run resumes from it"
        write(running, 310, attempt=later)
        write(running, 320, attempt=later)
        until(lambda: committed(place) == {200, 310, 320, 400}, what=lambda: f"{committed(place)} {running.log()[-3000:]}")
