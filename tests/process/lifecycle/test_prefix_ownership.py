"""Jobs that meet on one prefix."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, SILENCE_S
from sidecar.errors import ConfigurationError
from sidecar.lifecycle import run_document
from sidecar.lifecycle.run_document import claim
from sidecar.store.file.store import FileStore
from tests.process.conftest import ON_ONE_STORE, Place
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint
from tests.servers import REAL_STORES


@pytest.mark.slow
def test_of_two_jobs_on_one_prefix_the_second_is_refused_and_the_first_is_left_alone(place: Place, tmp_path: Path) -> None:
    unnamed = place.settings | {"JOB_NAME": ""}
    with sidecar(tmp_path / "first", unnamed) as first:
        write_checkpoint(first.ready().volume, "checkpoint-5", {"model": b"first"})
        first.committed("checkpoint-5")
        write_checkpoint(tmp_path / "second", "checkpoint-5", {"model": b"second"})
        with sidecar(tmp_path / "second", unnamed) as second:
            assert second.wait() == 2
            assert "is being written by another job" in second.log()
            assert "give each run its own prefix in CKPT_STORE" in second.log()
        write_checkpoint(first.volume, "checkpoint-10", {"model": b"first"})
        first.committed("checkpoint-10")
        assert place.store.get("checkpoint-5/model") == b"first"
        first.kill()
    # A new pod of the first job, whose old one died without a word, and an older step on its volume.
    write_checkpoint(tmp_path / "new", "checkpoint-7", {"model": b"third"})
    with sidecar(tmp_path / "new", unnamed) as third:
        assert third.up().resume()["checkpoint"] == "checkpoint-10"
        told = [event["event"] for event in third.events()]
        assert told.index("prefix_was_held") < told.index("prefix_taken_over") < told.index("resume_ready")
        write_checkpoint(third.volume, "checkpoint-15", {"model": b"third"})
        third.committed("checkpoint-15")
        assert third.terminate() == 0


@ON_ONE_STORE
def test_the_second_of_two_runs_is_refused_before_it_is_offered_anything(place: Place, tmp_path: Path) -> None:
    unnamed = place.settings | {"JOB_NAME": ""}
    with sidecar(tmp_path / "first", unnamed) as first:
        write_checkpoint(first.ready().volume, "checkpoint-10", {"model": b"first"})
        first.committed("checkpoint-10")
        with sidecar(tmp_path / "second", unnamed) as second:
            answers = []
            while second.process.poll() is None:
                with contextlib.suppress(OSError):  # the API does not answer yet, or no more
                    answers.append(second.call("POST", "/v1/resume", {"asked_by": "trainer"}))
                    answers.append(second.call("POST", "/v1/resume", {"checkpoint": "checkpoint-10", "asked_by": "person"}))
                    answers.append(second.call("GET", "/v1/resume?wait_s=1"))
            assert second.wait() == 2
            assert "is being written by another job" in second.log()
            assert {answer["state"] for answer in answers} == {"choosing"}, answers
            assert not second.events("resume_ready")
            assert not (second.volume / "checkpoint-10").exists()


@ON_ONE_STORE
def test_a_restart_on_the_same_volume_asks_nobody_before_it_resumes(place: Place, tmp_path: Path) -> None:
    unnamed = place.settings | {"JOB_NAME": ""}
    with sidecar(tmp_path / "volume", unnamed) as first:
        write_checkpoint(first.ready().volume, "checkpoint-10", {"model": b"first"})
        first.committed("checkpoint-10")
        first.kill()
    with sidecar(tmp_path / "volume", unnamed) as again:
        assert again.up().resume()["checkpoint"] == "checkpoint-10"
        assert not again.events("prefix_was_held")


@pytest.mark.parametrize("place", ["file", *REAL_STORES], indirect=True)
@pytest.mark.slow
def test_of_two_jobs_of_two_nodes_no_node_of_the_second_writes(place: Place, tmp_path: Path) -> None:
    def node(job: str, index: int) -> AbstractContextManager[Sidecar]:
        its = {"JOB_NAME": "", "CKPT_NODE_INDEX": str(index), "CKPT_NODE_COUNT": "2", "CKPT_GRACE_SECONDS": "3"}
        return sidecar(tmp_path / f"{job}{index}", place.settings | its)

    def save(running: Sidecar, name: str, job: str) -> None:
        write_checkpoint(running.volume, name, {f"part-{running.volume.name[-1]}": job.encode()}, {"attempt": job})

    with node("a", 0) as first, node("a", 1) as second:
        for running in (first.ready(), second.ready()):
            save(running, "checkpoint-5", "a")
        for running in (first, second):
            running.committed("checkpoint-5")
        with node("b", 0) as other_first, node("b", 1) as other_second:
            save(other_second.ready(), "checkpoint-5", "b")
            assert other_first.wait() == 2
            assert "is being written by another job" in other_first.log()
            [waits] = until(lambda: other_second.events("upload_waits"))
            assert "node 0 of attempt b does not hold the prefix" in waits["reason"]
            assert "give this job its own prefix in CKPT_STORE" in waits["reason"]
            save(other_second, "checkpoint-5", "b")  # the waiting sidecar is replaced, and must not continue
            until(lambda: len(other_second.events("upload_waits")) == 2)
            for running in (first, second):
                save(running, "checkpoint-10", "a")
            for running in (first, second):
                running.committed("checkpoint-10")
            assert waits["reason"] in str(other_second.status()["queue"])
            assert other_second.terminate() == 3
            assert waits["reason"] in str(other_second.report["given_up"])
    assert {place.store.get(f"{name}/part-{i}") for name in ("checkpoint-5", "checkpoint-10") for i in (0, 1)} == {b"a"}
    assert keys.commit("checkpoint-5") in place.keys("checkpoint-5/")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"run_id": "a", "beat": Infinity}', None])
def test_a_run_document_that_is_not_ours_is_named(content: bytes | None, tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (tmp_path / keys.RUN).write_bytes(content or b"")
    if content is None:
        os.truncate(tmp_path / keys.RUN, 100 << 30)
    with pytest.raises(ConfigurationError, match=r"run\.json is not this system's.*choose an empty prefix"):
        claim(store, run_id=None)


def test_a_damaged_run_document_is_read_again_until_its_writer_has_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes ended as if a person had to choose another prefix (campaign 90228)."""
    store, waits = FileStore(tmp_path), list[float]()

    def pause(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / keys.RUN).unlink()

    (tmp_path / keys.RUN).write_bytes(b'{"format": 1, "run_ie": "a"}')
    monkeypatch.setattr(run_document.time, "sleep", pause)
    assert claim(store, run_id="mine").run_id == "mine"
    assert waits == [run_document.UNREADABLE_PAUSE_S]


@pytest.mark.slow
def test_a_holder_whom_nobody_asks_writes_nothing(tmp_path: Path) -> None:
    document, asked = tmp_path / "store" / keys.RUN, tmp_path / "store" / keys.ASKED
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}", "JOB_NAME": ""}) as running:
        running.ready()
        until(lambda: b'"holder"' in document.read_bytes())
        before = document.stat().st_mtime_ns
        time.sleep(2 * ASK_POLL_S)
        assert document.stat().st_mtime_ns == before
        asked.write_text("{}")
        until(lambda: not asked.exists(), timeout_s=SILENCE_S)
        assert document.stat().st_mtime_ns != before


@ON_ONE_STORE
def test_another_job_of_kubernetes_is_refused_also_when_the_first_has_ended(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "first", place.settings | {"POD_NAMESPACE": "team", "JOB_NAME": "one"}) as first:
        first.ready()
        until(lambda: b'"holder"' in place.store.get(keys.RUN))
        assert first.terminate() == 0
    with sidecar(tmp_path / "second", place.settings | {"POD_NAMESPACE": "team", "JOB_NAME": "two"}) as second:
        assert second.wait() == 2
        assert "belongs to job 'team/one'" in second.log()
