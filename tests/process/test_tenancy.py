"""Jobs that meet on one prefix."""

from __future__ import annotations

from pathlib import Path

from sidecar.core import keys
from tests.process.conftest import Place
from tests.process.sidecar_process import sidecar, until, write_checkpoint


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
    # A new pod of the first job, whose old one died without a word: it waits for no answer, and is not refused.
    with sidecar(tmp_path / "new", unnamed) as third:
        assert third.up().resume()["checkpoint"] == "checkpoint-10"
        write_checkpoint(third.volume, "checkpoint-15", {"model": b"third"})
        third.committed("checkpoint-15")
        assert third.terminate() == 0


def test_another_job_of_kubernetes_is_refused_also_when_the_first_has_ended(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "first", place.settings | {"POD_NAMESPACE": "team", "JOB_NAME": "one"}) as first:
        first.ready()
        until(lambda: b'"holder"' in place.store.get(keys.RUN))
        assert first.terminate() == 0
    with sidecar(tmp_path / "second", place.settings | {"POD_NAMESPACE": "team", "JOB_NAME": "two"}) as second:
        assert second.wait() == 2
        assert "belongs to job 'team/one'" in second.log()
