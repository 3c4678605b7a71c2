"""Several pods of one job: each with its own volume and sidecar, and nothing between them but the store."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import keys
from tests.marks import slow
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint


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


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_step_that_another_node_committed_just_before_the_next_one_is_durable_for_every_node(
    place: Place, tmp_path: Path
) -> None:
    with sidecar(tmp_path / "0", of_node(place, 0)) as first, sidecar(tmp_path / "1", of_node(place, 1)) as second:
        pods, steps = (first.ready(), second.ready()), range(10, 50, 10)
        for step in steps:  # each is committed by the node that is the later one to write it
            for running in pods if step % 20 else reversed(pods):
                write_checkpoint(running.volume, f"checkpoint-{step}", {f"part-{running.volume.name}": b"x"}, MARKER)
                until(lambda of=running, name=f"checkpoint-{step}": name in uploaded(of))
        for running in pods:
            for step in steps:
                running.committed(f"checkpoint-{step}")
            assert running.events("checkpoint_superseded") == []


def uploaded(running: Sidecar) -> set[str]:
    return {event["checkpoint"] for event in running.events("checkpoint_uploaded")}


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
            answer = running.up().resume()
            assert answer["checkpoint"] == "checkpoint-5", answer
            assert contents(running.volume / "checkpoint-5") == {"rng.pth": b"of node %d" % index, "same": b"="}


@ON_ONE_STORE
@pytest.mark.slow
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


@ON_ONE_STORE
@pytest.mark.slow
def test_a_step_that_is_written_again_is_invisible_until_every_node_has_written_it_again(place: Place, tmp_path: Path) -> None:
    again = MARKER | {"created_at": "2026-01-01T01:00:00Z"}
    none = {"CKPT_RESUME": "off"}  # a download at the start would bring the other node's part onto this volume
    with (
        sidecar(tmp_path / "0", of_node(place, 0) | none) as first,
        sidecar(tmp_path / "1", of_node(place, 1) | none) as second,
    ):
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


def of_ranks(*ranks: int, world_size: int = 2) -> dict[str, Any]:
    return {"share": {"world_size": world_size, "ranks": ranks}}


SHARED_BY_ALL = {"model.safetensors": b"all", "mine.npz": b"unknown"}


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_what_a_node_did_without_is_fetched_as_soon_as_another_job_wants_it(place: Place, tmp_path: Path) -> None:
    marker = MARKER | {"world_size": 2}
    with sidecar(tmp_path / "0", of_node(place, 0)) as first, sidecar(tmp_path / "1", of_node(place, 1)) as second:
        write_checkpoint(first.ready().volume, "checkpoint-5", SHARED_BY_ALL | {"rng_state_0.pth": b"zero"}, marker)
        write_checkpoint(second.ready().volume, "checkpoint-5", {"rng_state_1.pth": b"one"}, marker)
        first.committed("checkpoint-5")
    everything = SHARED_BY_ALL | {"rng_state_0.pth": b"zero", "rng_state_1.pth": b"one"}
    volume = tmp_path / "new"
    on_demand = {"CKPT_RESUME": "on-demand"}
    with sidecar(volume, of_node(place, 1) | on_demand) as running:
        assert running.up().resume(**of_ranks(1))["state"] == "ready"
        assert contents(volume / "checkpoint-5") == SHARED_BY_ALL | {"rng_state_1.pth": b"one"}
        assert json.loads((volume / "checkpoint-5/.complete").read_text())["meta"]["partial"] == 1
        assert running.events("resume_download_started")[0]["files_left_out"] == 1
        assert running.resume("checkpoint-5", **of_ranks(1))["source"] == "local"
        shutil.rmtree(volume / "checkpoint-5")
        assert running.resume("checkpoint-5", **of_ranks(1))["source"] == "store"
        assert running.resume("checkpoint-5", **of_ranks(0))["source"] == "store", "its ranks came to another node"
        assert contents(volume / "checkpoint-5") == SHARED_BY_ALL | {"rng_state_0.pth": b"zero"}
        assert running.call("POST", "/v1/resume", of_ranks(2))["http_status"] == 422
        before = place.keys("checkpoint-5/")
    with sidecar(volume, place.settings | {"CKPT_STORE": f"file://{tmp_path / 'elsewhere'}"}) as alone:
        assert alone.ready().resume()["state"] == "none", "part of a checkpoint is nothing to continue from"
    with sidecar(volume, place.settings | on_demand) as alone:
        assert alone.ready().resume()["source"] == "store"
        assert contents(volume / "checkpoint-5") == everything
        assert "partial" not in json.loads((volume / "checkpoint-5/.complete").read_text())["meta"]
    assert place.keys("checkpoint-5/") == before, "what was downloaded is not uploaded"


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_finding_about_an_earlier_commit_revokes_no_later_one_that_another_node_wrote(place: Place, tmp_path: Path) -> None:
    """A sidecar that ended before it saw the commit revoked it at its next start. The other nodes had ended by then."""
    again = MARKER | {"attempt": "a-2", "created_at": "2026-01-01T01:00:00Z"}
    with sidecar(tmp_path / "old-0", of_node(place, 0)) as zero, sidecar(tmp_path / "old-1", of_node(place, 1)) as one:
        for running in (zero.ready(), one.ready()):
            write_checkpoint(running.volume, "checkpoint-5", {f"part-{running.volume.name}": b"v1"}, MARKER)
        zero.committed("checkpoint-5")
    place.store.put("checkpoint-5/part-old-0", b"other")
    with sidecar(tmp_path / "0", of_node(place, 0)) as zero, sidecar(tmp_path / "1", of_node(place, 1)) as one:
        assert zero.ready().resume()["state"] == "none"
        until(lambda: any("quarantined-" in key for key in place.keys("checkpoint-5/.ckpt/")))
        write_checkpoint(zero.volume, "checkpoint-5", {"part-0": b"v2"}, again)
        until(lambda: zero.events("checkpoint_uploaded"))
        zero.kill()
        write_checkpoint(one.ready().volume, "checkpoint-5", {"part-1": b"v2"}, again)
        one.committed("checkpoint-5")
        assert one.terminate() == 0
    commit = place.store.get(keys.commit("checkpoint-5"))
    with sidecar(tmp_path / "0", of_node(place, 0)) as zero:
        zero.committed("checkpoint-5")
        assert zero.terminate() == 0
    assert place.store.get(keys.commit("checkpoint-5")) == commit


@pytest.mark.parametrize("place", ["file"], indirect=True)
def test_a_clock_that_is_set_back_leaves_no_part_that_waits_for_nodes_without_end(place: Place, tmp_path: Path) -> None:
    """The newest durable step stayed the last one from before, so the part held its files, and the end of the pod."""
    before, after = ({**MARKER, "created_at": f"2026-01-01T{hour}:00:00Z"} for hour in ("12", "09"))
    with sidecar(tmp_path / "0", of_node(place, 0)) as zero, sidecar(tmp_path / "1", of_node(place, 1)) as one:
        for name, marker, nodes in (
            ("checkpoint-10", before, (zero.ready(), one.ready())),
            ("checkpoint-20", after, (one,)),  # node 0 could not save it
            ("checkpoint-30", after, (zero, one)),
        ):
            for running in nodes:
                write_checkpoint(running.volume, name, {f"part-{running.volume.name}": b"x"}, marker)
                until(lambda of=running, name=name: name in uploaded(of))
        for running in (zero, one):
            running.committed("checkpoint-30")
        until(lambda: [event["checkpoint"] for event in one.events("checkpoint_superseded")] == ["checkpoint-20"], timeout_s=10)
        assert one.status()["newest_durable_step"] == 30
        assert one.terminate() == 0


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("is_new", [False, True], ids=["the pod of node 1 stays", "all pods are new"])
def test_after_a_resume_from_an_older_step_a_node_0_whose_clock_is_behind_hides_no_new_step_from_the_others(
    place: Place, tmp_path: Path, is_new: bool
) -> None:
    """To them its attempt was the earlier one, and each step up to the newest of the last attempt was superseded."""
    before, behind = "20260301T120000Z-aaaaaaaa", "20260301T115500Z-bbbbbbbb"

    def save(step: int, attempt: str, *nodes: Sidecar) -> None:
        for index, running in enumerate(nodes):
            files = {f"__{index}_0.distcp": b"%d" % step, "rng.pth": b"%d of %d" % (step, index)}  # node 1 moves its own
            write_checkpoint(running.volume, f"checkpoint-{step}", files, MARKER | {"attempt": attempt})
        for running in nodes:
            running.committed(f"checkpoint-{step}", timeout_s=20)

    with sidecar(tmp_path / "1", of_node(place, 1) | {"POD_UID": "one"}) as one:
        with sidecar(tmp_path / "0", of_node(place, 0) | {"POD_UID": "zero"}) as zero:
            save(10, before, zero.ready(), one.ready())
            save(40, before, zero, one)
            zero.kill()
        with (
            sidecar(tmp_path / "new-0", of_node(place, 0) | {"POD_UID": "new-zero"}) as zero,
            sidecar(tmp_path / "new-1", of_node(place, 1) | {"POD_UID": "new-one"}) as new_one,
        ):
            nodes = (zero.ready(), new_one.ready() if is_new else one)
            assert [running.resume()["checkpoint"] for running in nodes] == ["checkpoint-40"] * 2
            assert [running.resume("checkpoint-10")["state"] for running in nodes] == ["ready"] * 2, "40 did not load"
            save(20, behind, *nodes)
            assert [running.status()["newest_durable_step"] for running in nodes] == [20] * 2


@pytest.mark.parametrize("place", ["file"], indirect=True)
@pytest.mark.parametrize("nodes", [1, *slow(2)])
def test_a_job_of_fewer_nodes_takes_its_parts_of_a_step_for_no_whole_step(place: Place, tmp_path: Path, nodes: int) -> None:
    """The markers name no node, and the volumes outlived the job of three: the step was committed without the third part."""

    def job(count: int) -> list[dict[str, str]]:
        uid = "POD_UID"
        return [of_node(place, index) | {"CKPT_NODE_COUNT": str(count), uid: f"{index}-{count}"} for index in range(count)]

    with ExitStack() as stack:
        three = [stack.enter_context(sidecar(tmp_path / str(index), its)) for index, its in enumerate(job(3))]
        for running in three:
            write_checkpoint(running.ready().volume, "checkpoint-10", {f"part-{running.volume.name}": b"10"}, MARKER)
        for running in three:
            running.committed("checkpoint-10")
        for running in three[:2]:
            write_checkpoint(running.volume, "checkpoint-20", {f"part-{running.volume.name}": b"20"}, MARKER)
            until(lambda of=running: "checkpoint-20" in uploaded(of))
        for running in three:
            running.kill()
    with ExitStack() as stack:
        fewer = [stack.enter_context(sidecar(tmp_path / str(index), its)) for index, its in enumerate(job(nodes))]
        for running in fewer:
            running.ready()
            until(lambda of=running: "checkpoint-20" in uploaded(of))
        assert fewer[0].resume()["checkpoint"] == "checkpoint-10"
        assert keys.commit("checkpoint-20") not in place.keys("checkpoint-20/")
