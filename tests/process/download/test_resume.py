"""The way back: what a new pod is given, and what it is never given."""

from __future__ import annotations

import random
import shutil
import signal
import time
import uuid
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.download.request_worker import LOCAL_PATIENCE_S
from tests import servers
from tests.process.conftest import BUCKET, ON_EACH_KIND, ON_ONE_STORE, MotoProcess, Place, S3Server
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint
from trainer_hook.process.client import Client

FILES_10 = {"model.safetensors": b"a" * 5000, "rng/state.pth": b"1", "empty": b""}
FILES_20 = {"model.safetensors": b"b" * 5000, "rng/state.pth": b"2", "empty": b""}


@pytest.fixture
def filled(place: Place, tmp_path: Path) -> Place:
    """A store with the steps 10 and 20 of a pod that is gone."""
    with sidecar(tmp_path / "old-volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", FILES_10)
        write_checkpoint(running.volume, "checkpoint-20", FILES_20, {"reason": "jit", "meta": {"train_call": 0}})
        running.committed("checkpoint-10")
        running.committed("checkpoint-20")
        assert running.terminate() == 0
    return place


@ON_EACH_KIND
def test_a_new_pod_resumes_from_the_newest_committed_step(filled: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", filled.settings) as running:
        answer = running.up().resume()
        assert (answer["state"], answer["checkpoint"], answer["step"], answer["passed_over"]) == (
            "ready",
            "checkpoint-20",
            20,
            [],
        )
        assert answer["path"] == str(running.volume / "checkpoint-20")
        assert contents(running.volume / "checkpoint-20") == FILES_20
        assert list((running.volume / ".ckpt/incoming").iterdir()) == []
        running.committed("checkpoint-20")
        assert running.status()["sent_bytes"] == 0, "what was downloaded is not uploaded again"


@ON_ONE_STORE
def test_the_hook_of_a_script_that_empties_its_output_folder_is_still_answered(filled: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", filled.settings) as running:
        running.ready().resume()
        for path in running.volume.iterdir():
            shutil.rmtree(path)
        answer = Client(f"http://127.0.0.1:{running.port}", running.volume).resume(
            "latest", train_call=None, timeout_s=20, tell=lambda _: None
        )
        assert (answer.known, answer.checkpoint) == (True, "checkpoint-20"), answer


@ON_ONE_STORE
def test_the_download_begins_before_anybody_asks(filled: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", filled.settings) as running:
        until(lambda: (running.volume / "checkpoint-20/.complete").exists())
        answer = running.resume()
        assert (answer["source"], answer["downloaded"]) == ("local", True)
        write_checkpoint(running.volume, "checkpoint-30", FILES_20)
        running.committed("checkpoint-30")
        answer = running.resume()
        assert (answer["checkpoint"], answer["source"], answer["downloaded"]) == ("checkpoint-30", "local", False)


@pytest.mark.parametrize("archived", ["model.safetensors", ".complete"])
def test_a_step_that_is_archived_in_the_store_is_passed_over(archived: str, moto_server: S3Server, tmp_path: Path) -> None:
    """A lifecycle rule did it. Nobody waits for it, and it is not known to be bad either."""
    settings = moto_server.settings(prefix=f"run-{uuid.uuid4().hex[:8]}")
    with sidecar(tmp_path / "old-volume", settings) as running:
        for name, files in (("checkpoint-10", FILES_10), ("checkpoint-20", FILES_20)):
            write_checkpoint(running.ready().volume, name, files)
            running.committed(name)
    prefix = settings["CKPT_STORE"].split("/", 3)[3]
    servers.archive(moto_server.endpoint, BUCKET, f"{prefix}/checkpoint-20/{archived}")
    with sidecar(tmp_path / "volume", settings) as running:
        answer = running.up().resume()
        assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-10")
        assert "restore it from the archive" in str(answer["passed_over"])
        named = running.resume("checkpoint-20")
        assert named["state"] == "failed", "it may be whole"
        assert "restore it from the archive" in named["detail"]
        assert {c["name"] for c in running.call("GET", "/v1/checkpoints?where=store")["checkpoints"]} >= {"checkpoint-10"}


def test_documents_that_are_too_large_are_passed_over_and_written_anew(tmp_path: Path) -> None:
    """They are corrupt: neither the memory of the sidecar nor a resume ends with them."""
    store = tmp_path / "store"
    settings = {"CKPT_STORE": f"file://{store}"}
    with sidecar(tmp_path / "old-volume", settings) as running:
        for name, files in (("checkpoint-10", FILES_10), ("checkpoint-20", FILES_20)):
            write_checkpoint(running.ready().volume, name, files)
            running.committed(name)
    for document in (store / "checkpoint-20/.complete", store / keys.ASKED):
        with document.open("wb") as file:
            file.truncate(100 << 30)
    with sidecar(tmp_path / "volume", settings) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == "checkpoint-10"
        assert "33554432 at most" in str(answer["passed_over"])
        write_checkpoint(running.volume, "checkpoint-20", FILES_20)
        running.committed("checkpoint-20")
        assert running.terminate() == 0
    assert (store / "checkpoint-20/.complete").stat().st_size < 10_000


@ON_ONE_STORE
def test_a_named_step_can_be_asked_for(filled: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", filled.settings | {"CKPT_RESUME": "on-demand"}) as running:
        answer = running.up().resume("checkpoint-10")
        assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-10")
        assert contents(running.volume / "checkpoint-10") == FILES_10


@ON_EACH_KIND
def test_a_truncated_object_quarantines_its_step_and_the_older_one_is_used(filled: Place, tmp_path: Path) -> None:
    filled.store.put("checkpoint-20/model.safetensors", FILES_20["model.safetensors"][:-1])
    with sidecar(tmp_path / "volume", filled.settings) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == "checkpoint-10"
        assert contents(running.volume / "checkpoint-10") == FILES_10
        [passed] = answer["passed_over"]
        assert passed["checkpoint"] == "checkpoint-20"
        assert "model.safetensors: 4999 bytes in the store, its writer recorded 5000" in passed["reason"]
        assert "checkpoint-20" in running.status()["bad"]


def test_swapped_objects_of_equal_size_are_found_out(filled: Place, tmp_path: Path) -> None:
    filled.store.put("checkpoint-20/model.safetensors", FILES_10["model.safetensors"])
    with sidecar(tmp_path / "volume", filled.settings) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == "checkpoint-10"
        assert "crc64nvme" in answer["passed_over"][0]["reason"]
        assert not (running.volume / "checkpoint-20").exists()


@pytest.mark.parametrize("damage", ["missing data", "missing manifest", "other manifest", "bad commit"])
def test_nothing_damaged_is_ever_resumed(damage: str, filled: Place, tmp_path: Path) -> None:
    [manifest] = [key for key in filled.keys(keys.manifests("checkpoint-20")) if key.endswith(".json")]
    match damage:
        case "missing data":
            filled.store.delete(["checkpoint-20/rng/state.pth"])
        case "missing manifest":
            filled.store.delete([manifest])
        case "other manifest":
            filled.store.put(manifest, filled.store.get(manifest).replace(b'"path"', b'"path" '))
        case "bad commit":
            filled.store.put(keys.commit("checkpoint-20"), b"{")
    with sidecar(tmp_path / "volume", filled.settings) as running:
        answer = running.up().resume()
        assert answer["checkpoint"] == "checkpoint-10"
        assert [p["checkpoint"] for p in answer["passed_over"]] == ["checkpoint-20"]


def test_without_its_commit_a_checkpoint_is_invisible(filled: Place, tmp_path: Path) -> None:
    filled.store.delete([keys.commit("checkpoint-20")])
    with sidecar(tmp_path / "volume", filled.settings) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-10"


def test_an_empty_store_gives_nothing_to_resume_from(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        answer = running.up().resume()
        assert (answer["state"], answer["path"], answer["passed_over"]) == ("none", None, [])


@ON_ONE_STORE
def test_only_checkpoints_of_the_train_call_that_asks_are_offered(filled: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", filled.settings) as running:
        assert running.up().resume(train_call=1)["state"] == "none"
        assert running.resume(train_call=0)["checkpoint"] == "checkpoint-20"


@ON_ONE_STORE
def test_what_an_earlier_train_call_still_sends_is_not_passed_over_by_the_next_one(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings | {"CKPT_BANDWIDTH_LIMIT": "100KB/s"}) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-20", {"a": b"a", "model": bytes(3_000_000)}, {"meta": {"train_call": 0}})
        until(lambda: place.keys("checkpoint-20/"))
        answer = running.resume(train_call=1)
        assert (answer["state"], answer["passed_over"]) == ("none", [])
        assert running.resume(train_call=0)["checkpoint"] == "checkpoint-20"
        running.kill()


@ON_EACH_KIND
def test_kill_9_in_mid_download_continues_with_what_verified(place: Place, tmp_path: Path) -> None:
    files = {f"shard-{i:03d}": random.Random(i).randbytes(400_000) for i in range(100)}
    with sidecar(tmp_path / "old-volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", files)
        running.committed("checkpoint-10")
    volume = tmp_path / "volume"
    with sidecar(volume, place.settings | {"CKPT_CONCURRENCY": "1"}) as first:
        until(lambda: sum(1 for p in (volume / ".ckpt/incoming").glob("*/shard-*")) > 5, every_s=0.001)
        first.kill()
    assert not (volume / "checkpoint-10").exists()
    whole = (path for path in (volume / ".ckpt/incoming").glob("*/shard-???") if path.read_bytes() == files[path.name])
    kept = {path.name: path.stat().st_ino for path in whole}
    assert kept
    with sidecar(volume, place.settings) as second:
        assert second.up().resume()["checkpoint"] == "checkpoint-10"
        assert contents(volume / "checkpoint-10") == files
        assert all((volume / "checkpoint-10" / name).stat().st_ino == inode for name, inode in kept.items())


@pytest.mark.slow
def test_a_sidecar_that_was_stopped_while_it_asked_the_store_does_not_take_the_store_for_away(
    moto_process: MotoProcess, tmp_path: Path
) -> None:
    """A suspended machine: the trainer continued from the older step of its volume."""
    settings = moto_process.settings(prefix="run")
    volume = tmp_path / "volume"
    for place, step in ((volume, 10), (tmp_path / "other", 20)):
        with sidecar(place, settings) as running:
            write_checkpoint(running.ready().volume, f"checkpoint-{step}", FILES_10)
            running.committed(f"checkpoint-{step}")
            assert running.terminate() == 0
    with sidecar(volume, settings | {"CKPT_RESUME": "on-demand"}) as running:
        running.ready()
        moto_process.pause()
        asked = running.call("POST", "/v1/resume", {"checkpoint": "latest", "asked_by": "trainer"})
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(LOCAL_PATIENCE_S + 1)
        moto_process.go_on()
        running.process.send_signal(signal.SIGCONT)
        assert running.answer(asked["id"])["checkpoint"] == "checkpoint-20"


@ON_ONE_STORE
def test_a_restarted_trainer_continues_from_its_own_volume_without_a_download(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-30", FILES_10)
        running.committed("checkpoint-30")
        answer = running.resume()
        assert (answer["checkpoint"], answer["source"]) == ("checkpoint-30", "local")
        assert running.events("resume_download_started") == []


@ON_ONE_STORE
def test_what_a_cut_rotation_left_on_a_lasting_volume_is_neither_resumed_nor_committed_by_the_next_pod(
    place: Place, tmp_path: Path
) -> None:
    """A marker without an attempt is of another attempt for the next pod, and still the one that was committed."""
    with sidecar(tmp_path / "volume", place.settings | {"POD_UID": "pod-a"}) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-30", FILES_10)
        running.committed("checkpoint-30")
        assert running.terminate() == 0
    commit = place.read("checkpoint-30/.complete")
    (tmp_path / "volume/checkpoint-30" / sorted(FILES_10)[0]).unlink()
    with sidecar(tmp_path / "volume", place.settings | {"POD_UID": "pod-b"}) as running:
        answer = running.up().resume()
        assert (answer["checkpoint"], answer["source"]) == ("checkpoint-30", "store")
        assert contents(running.volume / "checkpoint-30") == FILES_10
        assert running.terminate() == 0
    assert place.read("checkpoint-30/.complete") == commit


def test_a_copy_that_was_changed_after_its_download_is_fetched_again(filled: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", filled.settings | {"CKPT_RESUME": "on-demand"}) as running:
        assert running.up().resume()["source"] == "store"
        assert running.resume()["source"] == "local"
        (running.volume / "checkpoint-20/model.safetensors").write_bytes(b"c" * 5000)
        assert running.resume()["source"] == "store"
        assert contents(running.volume / "checkpoint-20") == FILES_20


def test_a_step_committed_anew_leaves_quarantine(filled: Place, tmp_path: Path) -> None:
    filled.store.put("checkpoint-20/model.safetensors", FILES_10["model.safetensors"])
    with sidecar(tmp_path / "volume", filled.settings) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-10"
        write_checkpoint(running.volume, "checkpoint-20", FILES_20, {"attempt": "later"})
        running.committed("checkpoint-20")
    with sidecar(tmp_path / "volume-2", filled.settings) as running:
        assert running.up().resume()["checkpoint"] == "checkpoint-20"


@ON_ONE_STORE
def test_a_checkpoint_that_the_trainer_writes_during_the_download_is_not_replaced(place: Place, tmp_path: Path) -> None:
    files = {f"shard-{i:03d}": random.Random(i).randbytes(400_000) for i in range(60)}
    with sidecar(tmp_path / "old-volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", files)
        running.committed("checkpoint-10")
    with sidecar(tmp_path / "volume", place.settings | {"CKPT_CONCURRENCY": "1"}) as running:
        until(lambda: list((running.volume / ".ckpt/incoming").glob("*/shard-*")))
        write_checkpoint(running.volume, "checkpoint-10", FILES_10)
        running.up()
        answer = until(lambda: a if (a := running.resume())["state"] == "ready" else None)
        assert (answer["checkpoint"], answer["source"]) == ("checkpoint-10", "local")
        assert contents(running.volume / "checkpoint-10") == FILES_10
