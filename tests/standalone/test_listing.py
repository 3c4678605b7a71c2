"""A prefix with more objects than a page of a listing has."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.core.lifecycle.run_document import encode_run
from sidecar.standalone.listing import FEW_OBJECTS
from tests.standalone.conftest import Person


@pytest.mark.parametrize("count", [1, FEW_OBJECTS // 2, FEW_OBJECTS])
def test_every_checkpoint_is_listed_once_however_many_there_are(local: Person, count: int) -> None:
    names = [f"checkpoint-{step}" for step in range(1, count + 1)] + ["final"]
    for name in names:
        folder = Path(local.url.removeprefix("file://"), name)
        folder.mkdir(parents=True)
        for file in ("model.safetensors", ".complete"):
            (folder / file).write_bytes(b"{}")
    thresholds = gc.get_threshold()
    listed = local.json("ls", local.url)["checkpoints"]
    assert gc.get_threshold() == thresholds
    assert [found["name"] for found in listed] == ["final", *reversed(names[:-1])]
    assert {(found["state"], found["objects"]) for found in listed} == {("committed", 1)}
    assert [found["name"] for found in local.json("ls", local.url, "--newest", "2")["checkpoints"]] == (
        [found["name"] for found in listed[:2]]
    )


def test_what_a_probe_left_is_no_run(local: Person) -> None:
    with local.store() as store:
        store.put("llama/checkpoint-1/.complete", b"{}")
        store.put(f"{keys.PROBE}left", b"by a probe that may not delete")
    assert [run["name"] for run in local.json("ls", local.url)["runs"]] == ["llama"]


def test_the_runs_of_a_prefix_name_their_latest_pod_and_folders_stand_apart(local: Person) -> None:
    ended = Run("r1", job="team-a/llama", holder="llama-0", ending=True)
    with local.store() as store:
        store.put("llama/run.json", encode_run(ended))
        store.put("llama/checkpoint-1/.complete", b"{}")
        store.put("archive/old/checkpoint-1/.complete", b"{}")
    assert local.run("ls", local.url) == 0
    lines = local.out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["RUN", "CHECKPOINTS", "NEWEST", "JOB", "LATEST", "POD"],
        ["llama/", "1", "checkpoint-1", "team-a/llama", "llama-0"],
    ]
    assert lines[2:] == [f"{local.url}/archive is no run; those below it: checkpoint-sidecar ls {local.url}/archive"]
