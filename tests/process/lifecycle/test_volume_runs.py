"""One volume that several runs use one after the other, each with a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.process.sidecar_process import Sidecar, sidecar, write_checkpoint


@contextmanager
def pod(tmp_path: Path, uid: str, *, job: str, store: str) -> Iterator[Sidecar]:
    """A pod with a private state of its own, as an emptyDir is."""
    (tmp_path / "stores" / store).mkdir(parents=True, exist_ok=True)
    (tmp_path / "states" / uid).mkdir(parents=True, exist_ok=True)
    slash = "/" * (uid.endswith("2") and bool(job))  # one store is written in two ways
    settings = {"CKPT_STORE": f"file://{tmp_path}/stores/{store}{slash}", "CKPT_STATE_DIR": f"{tmp_path}/states/{uid}"}
    settings |= {"POD_UID": uid, "CKPT_RESUME": "on-demand", "JOB_NAME": job}
    with sidecar(tmp_path / "volume", settings) as running:
        yield running.ready()
        assert running.terminate() == 0, running.log()


def committed(tmp_path: Path, store: str) -> set[str]:
    return {path.parent.name for path in (tmp_path / "stores" / store).rglob("checkpoint-*/.complete")}


def test_a_run_takes_no_checkpoint_of_another_run_for_its_own(tmp_path: Path) -> None:
    """A job on a volume that another job had used resumed from that job's checkpoint, and committed it to its own prefix."""
    with pod(tmp_path, "a-1", job="exp-a", store="a") as running:
        write_checkpoint(running.volume, "checkpoint-50", {"m": b"of a"}, {})
        running.committed("checkpoint-50")
    for uid in ("b-1", "b-1", "b-2"):  # also once its sidecar, or its pod, was started again
        with pod(tmp_path, uid, job="exp-b", store="b") as running:
            if not (tmp_path / "volume/checkpoint-5").exists():
                answer = running.resume()
                assert (answer["state"], answer["passed_over"][0]["checkpoint"]) == ("none", "checkpoint-50")
                assert "a run with another CKPT_STORE" in answer["passed_over"][0]["reason"], "the trainer's log says it, too"
                write_checkpoint(running.volume, "checkpoint-5", {"m": b"of b"}, {})
            running.committed("checkpoint-5")
            assert running.resume()["checkpoint"] == "checkpoint-5"
            [said] = running.events("checkpoints_of_another_run")[-1:]
            assert (said["checkpoints"], said["of"]) == (["checkpoint-50"], ["default/exp-a"])
    assert committed(tmp_path, "b") == {"checkpoint-5"}
    assert (tmp_path / "volume/checkpoint-50/m").read_bytes() == b"of a", "it is left alone"
    with pod(tmp_path, "a-2", job="exp-a", store="a") as running:
        assert running.resume()["checkpoint"] == "checkpoint-50"


def test_a_run_without_a_name_is_known_by_its_store(tmp_path: Path) -> None:
    for uid in ("a-1", "a-2"):
        with pod(tmp_path, uid, job="", store="a") as running:
            if uid == "a-1":
                write_checkpoint(running.volume, "checkpoint-50", {"m": b"of a"}, {})
            running.committed("checkpoint-50")
            assert running.resume()["checkpoint"] == "checkpoint-50"
            assert not running.events("checkpoints_of_another_run")
    with pod(tmp_path, "b-1", job="", store="b") as running:
        assert running.resume()["state"] == "none"


def test_a_run_whose_store_has_moved_goes_on_from_its_volume(tmp_path: Path) -> None:
    with pod(tmp_path, "a-1", job="exp-a", store="a") as running:
        write_checkpoint(running.volume, "checkpoint-50", {"m": b"of a"}, {})
        running.committed("checkpoint-50")
    with pod(tmp_path, "a-2", job="exp-a", store="moved") as running:
        assert running.resume()["checkpoint"] == "checkpoint-50"
        running.committed("checkpoint-50")
        assert not running.events("checkpoints_of_another_run")
    assert committed(tmp_path, "moved") == {"checkpoint-50"}


def test_a_step_that_the_present_run_writes_over_another_ones_is_its_own(tmp_path: Path) -> None:
    with pod(tmp_path, "a-1", job="exp-a", store="a") as running:
        write_checkpoint(running.volume, "checkpoint-50", {"m": b"of a"}, {})
        running.committed("checkpoint-50")
    with pod(tmp_path, "b-1", job="exp-b", store="b") as running:
        (running.volume / "checkpoint-50/.complete").unlink()
        write_checkpoint(running.volume, "checkpoint-50", {"m": b"of b"}, {})
        running.committed("checkpoint-50")
    assert (tmp_path / "stores/b/checkpoint-50/m").read_bytes() == b"of b"
