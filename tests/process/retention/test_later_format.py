"""A prefix in which a later version has written, and from which its run went back to this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidecar.core.format import keys
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import sidecar, until, write_checkpoint

pytestmark = ON_ONE_STORE

SAYS = "format 2 is newer than this software, which reads 1: update the sidecar"
ATTEMPT = "20270115T080000Z-a"


def rewrite(place: Place, key: str, *, version: int = 2) -> bytes:
    """Write a document as a later version does: another number, and fields that nobody knows."""
    raw = json.dumps(json.loads(place.store.get(key)) | {"format": version, "shards": [{"path": 7}], "files": {}}).encode()
    place.store.put(key, raw)
    return raw


def commit_two(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", place.settings) as running:
        running.ready()
        for step in (10, 20):
            files = {"a": f"step {step}".encode()}
            write_checkpoint(running.volume, f"checkpoint-{step}", files, {"attempt": ATTEMPT, "step": step})
            running.committed(f"checkpoint-{step}")
        assert running.terminate() == 0


@pytest.mark.slow
def test_a_checkpoint_of_a_later_format_is_passed_over_and_stays(place: Place, tmp_path: Path) -> None:
    commit_two(place, tmp_path)
    key = keys.commit("checkpoint-20")
    raw = rewrite(place, key)
    before = place.keys("checkpoint-20/")
    settings = place.settings | {"CKPT_KEEP_STORE": "1", "CKPT_GRACE_SECONDS": "4"}
    with sidecar(tmp_path / "1", settings) as running:
        answer = running.ready().resume()
        assert answer["checkpoint"] == "checkpoint-10"
        [passed] = answer["passed_over"]
        assert SAYS in passed["reason"]
        assert passed["may_be_whole"]
        for step in (20, 30, 40):  # the run repeats the step, and goes on
            files = {"a": f"again {step}".encode()}
            write_checkpoint(running.volume, f"checkpoint-{step}", files, {"attempt": "20270116T080000Z-b", "step": step})
            if step > 20:
                running.committed(f"checkpoint-{step}")
        [failed] = until(lambda: running.events("upload_starts_again")[:1])
        assert failed["checkpoint"] == "checkpoint-20"
        assert SAYS in failed["error"]
        assert "update the sidecar" in failed["hint"]
        [deleted] = until(lambda: running.events("store_checkpoint_deleted"))
        assert deleted["checkpoint"] == "checkpoint-30"
        assert running.terminate() == 3, "a repeated step is given up"
    assert place.store.get(key) == raw
    assert place.keys("checkpoint-20/") == before, "no quarantine of a later version's checkpoint, and nothing deleted"
    with sidecar(tmp_path / "2", place.settings) as running:
        answer = running.ready().resume("checkpoint-20")
        assert answer["state"] == "failed"
        assert SAYS in answer["detail"]
        url = f"{place.settings['CKPT_STORE']}/checkpoint-20"
        assert SAYS in running.command("verify", url).stdout
        assert running.terminate() == 0
        removed = running.command("rm", url, "--yes")
        assert (removed.returncode, SAYS in removed.stderr) == (1, True), removed
    assert place.store.get(key) == raw


@pytest.mark.slow
def test_a_prefix_that_a_later_version_holds_is_refused_in_one_sentence(place: Place, tmp_path: Path) -> None:
    commit_two(place, tmp_path)
    raw = rewrite(place, keys.RUN)
    with sidecar(tmp_path / "1", place.settings) as running:
        assert running.wait() == 2
        assert "run.json: " + SAYS in running.log()
        assert "delete it" not in running.log()
    assert place.store.get(keys.RUN) == raw


@pytest.mark.slow
def test_a_holder_does_not_write_a_later_versions_document_again(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "0", place.settings) as running:
        running.ready()
        until(lambda: place.keys("run-claims/"))
        raw = rewrite(place, keys.RUN)
        until(lambda: any(SAYS in event["error"] for event in running.events("no_heartbeat")), timeout_s=30)
        assert place.store.get(keys.RUN) == raw
        assert running.process.poll() is None
