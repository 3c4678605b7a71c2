"""Several pods of one job: each with its own volume and sidecar, and nothing between them but the store."""

from __future__ import annotations

import json
from pathlib import Path

from sidecar.core import keys
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint


def of_node(place: Place, index: int) -> dict[str, str]:
    return place.settings | {"CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": "2"}


MARKER = {"attempt": "a-1", "created_at": "2026-01-01T00:00:00Z"}


def test_a_step_is_committed_once_when_the_last_node_is_there(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", of_node(place, 0)) as first, sidecar(tmp_path / "1", of_node(place, 1)) as second:
        first.ready()
        second.ready()
        write_checkpoint(first.volume, "checkpoint-5", {"__0_0.distcp": b"zero"}, MARKER)
        until(lambda: first.events("checkpoint_uploaded"))
        assert keys.commit("checkpoint-5") not in place.keys("checkpoint-5/")
        assert "waiting for node 1" in until(lambda: first.status()["queue"][0]["reason"])
        write_checkpoint(second.volume, "checkpoint-5", {"__1_0.distcp": b"one"}, MARKER)
        first.committed("checkpoint-5")
        second.committed("checkpoint-5")
        assert len(json.loads(place.store.get(keys.commit("checkpoint-5")))["manifests"]) == 2
        assert first.terminate() == 0
        assert second.terminate() == 0


def test_nodes_that_share_a_path_but_not_its_content_each_get_their_own_back(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", of_node(place, 0)) as first, sidecar(tmp_path / "1", of_node(place, 1)) as second:
        first.ready()
        second.ready()
        write_checkpoint(first.volume, "checkpoint-5", {"rng.pth": b"of node 0", "same": b"="}, MARKER)
        write_checkpoint(second.volume, "checkpoint-5", {"rng.pth": b"of node 1", "same": b"="}, MARKER)
        first.committed("checkpoint-5")
        second.committed("checkpoint-5")
    assert place.store.get("checkpoint-5/rng.pth") == b"of node 0"
    for index in (0, 1):
        with sidecar(tmp_path / f"new-{index}", of_node(place, index)) as running:
            assert running.up().resume()["checkpoint"] == "checkpoint-5"
            assert contents(running.volume / "checkpoint-5") == {"rng.pth": b"of node %d" % index, "same": b"="}


def test_a_node_that_dies_before_its_part_is_there_leaves_the_older_step(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", of_node(place, 0)) as first, sidecar(tmp_path / "1", of_node(place, 1)) as second:
        first.ready()
        second.ready()
        for running in (first, second):
            write_checkpoint(running.volume, "checkpoint-5", {f"part-{running.volume.name}": b"5"}, MARKER)
        first.committed("checkpoint-5")
        second.kill()
        write_checkpoint(first.volume, "checkpoint-10", {"part-0": b"10"}, MARKER)
        until(lambda: "checkpoint-10" in {event["checkpoint"] for event in first.events("checkpoint_uploaded")})
        assert first.terminate() in (0, 3)
    with sidecar(tmp_path / "new", of_node(place, 1)) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == "checkpoint-5"
        assert contents(running.volume / "checkpoint-5") == {"part-0": b"5", "part-1": b"5"}


def test_a_step_that_is_written_again_is_invisible_until_every_node_has_written_it_again(place: Place, tmp_path: Path) -> None:
    again = MARKER | {"created_at": "2026-01-01T01:00:00Z"}
    with sidecar(tmp_path / "0", of_node(place, 0)) as first, sidecar(tmp_path / "1", of_node(place, 1)) as second:
        for running in (first.ready(), second.ready()):
            write_checkpoint(running.volume, "checkpoint-5", {f"part-{running.volume.name}": b"v1"}, MARKER)
        first.committed("checkpoint-5")
        second.committed("checkpoint-5")
        write_checkpoint(first.volume, "checkpoint-5", {"part-0": b"v2"}, again)
        until(lambda: any("waiting for node 1" in (waiting["reason"] or "") for waiting in first.status()["queue"]))
        assert keys.commit("checkpoint-5") not in place.keys("checkpoint-5/")
        write_checkpoint(second.volume, "checkpoint-5", {"part-1": b"v2"}, again)
        until(lambda: len(first.events("checkpoint_committed")) == 2)
        until(lambda: len(second.events("checkpoint_committed")) == 2)
    assert {place.store.get(f"checkpoint-5/part-{index}") for index in (0, 1)} == {b"v2"}
