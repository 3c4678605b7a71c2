"""Forged documents of the lease: a writer of the bucket can make a pod wait or end, but not use a wrong step."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.bucket.forged import Forged, content_of
from tests.hostile.checks import check_log
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

OTHER = "0123456789abcdef"
FILE_STORE = pytest.mark.parametrize("place", ["file"], indirect=True)


def run(**fields: Any) -> bytes:
    return json.dumps({"format": 1, "run_id": "run"} | fields).encode()


def claim(epoch: int, holder: str = OTHER) -> str:
    return f"run-claims/{epoch:08d}-{holder}.json"


Objects = dict[str, bytes]
HARMLESS: dict[str, Objects] = {
    "epochs that no prefix reaches": {claim(99_999_999): b"{}", claim(10_000_001): b"{}"},
    "a high epoch, and an age that is none": {claim(5000): b'{"format": 1, "holder": "x", "age_s": NaN}'},
    "ages out of range": {claim(1): b'{"age_s": 1e400}', claim(2): b'{"age_s": -1}', claim(3): b'{"age_s": true}'},
    "deep claims": {claim(4): b"[" * 100_000, claim(5): b'{"a":' * 100_000},
    "a claim of ten megabytes": {claim(6): b" " * (10 << 20)},
    "keys that are no claims": {
        f"run-claims/{name}": b"x" for name in ("x", "00000009-x.json", "-1.json", "00000009-" + OTHER + ".json.tmp", "a/b/c")
    },
    "an epoch of the run that is none": {"run.json": run(epoch=10**12)},
    "many attempts": {"run.json": run(attempts=[f"a{n}" for n in range(50_000)])},
    "an arrival from long ago": {f"run-claims/arrived-{OTHER}.json": b"{}"},
}


def put(place: Place, objects: Objects) -> None:
    Forged(1).put(place.store)
    for key, content in objects.items():
        place.store.put(key, content)


RUNS = [objects["run.json"] for objects in HARMLESS.values() if "run.json" in objects]
CLAIMS = {key: content for objects in HARMLESS.values() for key, content in objects.items() if key != "run.json"}


@FILE_STORE
def test_forged_claims_and_runs_hold_no_pod_up(place: Place, tmp_path: Path) -> None:
    put(place, CLAIMS)
    for step, document in enumerate(RUNS, 1):
        place.store.put("run.json", document)
        with sidecar(tmp_path / f"volume-{step}", place.settings | {"POD_UID": f"pod-{step}"}) as running:
            assert running.up().resume()["checkpoint"] == f"checkpoint-{step}"
            write_checkpoint(running.volume, f"checkpoint-{step + 1}", {"model": b"new"}, {})
            running.committed(f"checkpoint-{step + 1}")
            if step == 1:
                assert contents(running.volume / "checkpoint-1") == {"model": content_of(1)}
            assert running.terminate() == 0
            check_log(running)
    assert all(place.read(key) == content for key, content in CLAIMS.items() if "arrived" not in key)


@pytest.mark.slow
@FILE_STORE
def test_a_run_that_is_forged_while_a_pod_holds_the_prefix_is_written_again(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"model": b"new"}, {})
        running.committed("checkpoint-1")
        before = json.loads(place.read("run.json"))
        for step, document in enumerate([*RUNS, b"[" * 100_000, b"", bytes(2 << 20)], 2):
            place.store.put("run.json", document)
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": b"new"}, {})
            running.committed(f"checkpoint-{step}")
        until(lambda: holder_of(place) == before["holder"], timeout_s=30)
        assert running.terminate() == 0
    check_log(running)


def holder_of(place: Place) -> Any:
    try:
        return json.loads(place.read("run.json")).get("holder")
    except ValueError:
        return None


@FILE_STORE
@pytest.mark.parametrize(
    "fields", [{"epoch": 10**30}, {"epoch": -5}, {"attempts": "abc"}, {"beat": -1}, {"ending": "yes"}], ids=str
)
def test_a_run_of_other_types_ends_the_start_with_one_line_that_names_it(
    fields: dict[str, Any], place: Place, tmp_path: Path
) -> None:
    put(place, {"run.json": run(**fields)})
    with sidecar(tmp_path / "volume", place.settings) as running:
        assert running.wait() == 2
    [line] = [line for line in running.log().splitlines() if "run.json is not this system's" in line]
    assert "delete it" in line
    assert place.read("run.json") == run(**fields)


@FILE_STORE
def test_a_claim_that_leaves_no_next_epoch_ends_the_start_with_one_line_that_names_it(place: Place, tmp_path: Path) -> None:
    put(place, {claim(10_000_000): b"{}"})
    with sidecar(tmp_path / "volume", place.settings) as running:
        assert running.wait() == 2
    [line] = [line for line in running.log().splitlines() if claim(10_000_000) in line]
    assert "delete it" in line


@FILE_STORE
def test_a_claim_from_the_future_is_no_later_pod(place: Place, tmp_path: Path) -> None:
    put(place, {claim(7): b'{"format": 1, "holder": "x", "age_s": 0}'})
    for seconds in (3600, 10**9, 10**11):
        os.utime(tmp_path / "store" / claim(7), (time.time() + seconds,) * 2)
        with sidecar(tmp_path / f"volume-{seconds}", place.settings | {"POD_UID": f"pod-{seconds}"}) as running:
            assert running.up().resume()["checkpoint"] == "checkpoint-1"
            running.ready()
            assert running.terminate() == 0


@pytest.mark.slow
@FILE_STORE
def test_a_pod_that_is_said_to_end_for_ever_is_waited_for_only_while_it_gives_signs_of_life(
    place: Place, tmp_path: Path
) -> None:
    """Of a holder that says nothing of its heartbeats 15 s of silence are enough."""
    put(place, {"run.json": run(holder="other", job="default/tests", ending=True, ends_in_s=1e18, beat=1)})
    with sidecar(tmp_path / "volume", place.settings) as running:
        until(lambda: running.events("waits_for_earlier_pod") or running.events("prefix_was_held"))
        assert running.up().resume()["checkpoint"] == "checkpoint-1"
        running.ready()
