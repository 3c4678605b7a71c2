"""A checkpoint's way to the store, with a trainer that is a shell script."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.core.format.manifest import decode_commit, decode_manifest
from tests.process.conftest import ON_EACH_KIND, ON_ONE_STORE, Place
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

FILES = {"model.safetensors": b"weights" * 1000, "sub folder/ünï.bin": b"x", "empty": b""}


def big(size_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@ON_ONE_STORE
def test_a_ten_line_shell_script_is_a_trainer(place: Place, tmp_path: Path) -> None:
    script = """
    set -e
    for step in 10 20; do
        mkdir -p "$CKPT_DIR/checkpoint-$step"
        echo "weights of step $step" > "$CKPT_DIR/checkpoint-$step/weights.txt"
        touch "$CKPT_DIR/checkpoint-$step/.complete"
    done
    """
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        subprocess.run(["sh", "-c", script], env={**os.environ, "CKPT_DIR": str(running.volume)}, check=True)
        running.committed("checkpoint-20")
        running.committed("checkpoint-10")
        assert place.read("checkpoint-20/weights.txt") == b"weights of step 20\n"
        assert running.terminate() == 0
        assert running.report["newest_durable_step"] == 20
        assert running.report["given_up"] == []


@ON_EACH_KIND
def test_what_is_committed_names_every_byte_that_was_written(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        marker = {"format": 1, "step": 7, "reason": "jit", "attempt": "a-1", "world_size": 1, "meta": {"loss": 1.5}}
        write_checkpoint(running.volume, "checkpoint-7", FILES, marker)
        running.committed("checkpoint-7")
        commit = decode_commit(place.read(keys.commit("checkpoint-7")), key=keys.commit("checkpoint-7"))
        assert (commit.step, commit.attempt, commit.reason, commit.meta) == (7, "a-1", "jit", {"loss": 1.5})
        [named] = commit.manifests
        manifest = decode_manifest(place.read(named.key), key=named.key)
        assert {entry.path: place.read(entry.key) for entry in manifest.files} == FILES


def test_names_that_only_resemble_a_checkpoint_are_left_alone(tmp_path: Path) -> None:
    others = ["checkpoint-20.tmp", "checkpoint--1", "checkpoint-1e3", "tmp-checkpoint-20", "checkpoint-007", "checkpoint-"]
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        for name in others:
            write_checkpoint(running.volume, name, FILES)
        write_checkpoint(running.volume, "checkpoint-3", FILES)
        running.committed("checkpoint-3")
        assert [c["name"] for c in running.call("GET", "/v1/checkpoints")["checkpoints"]] == ["checkpoint-3"]
        assert {path.name for path in (tmp_path / "store").glob("*checkpoint*")} == {"checkpoint-3"}


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        (b"{not json", "not JSON"),
        (b'{"step": 5}', "step 5"),
        (b'{"files": [{"path": "../x", "size_bytes": 1}]}', "../x"),
        (b'{"files": [{"path": "gone", "size_bytes": 1}]}', "gone"),
        (b'{"files": [{"path": "empty", "size_bytes": 1}]}', "empty"),
        (b'{"format": 2}', "format 2"),
        (b'{"meta": "' + b"x" * (1 << 20) + b'"}', "larger than"),
    ],
)
def test_a_bad_marker_rejects_that_checkpoint_alone_and_visibly(marker: bytes, why: str, tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        folder = running.volume / "checkpoint-4"
        folder.mkdir()
        (folder / "empty").touch()
        (folder / ".complete").write_bytes(marker)
        write_checkpoint(running.volume, "checkpoint-2", FILES)
        running.committed("checkpoint-2")
        rejected = until(lambda: running.status()["rejected"])
        assert why in rejected["checkpoint-4"]
        assert [e["checkpoint"] for e in running.events("checkpoint_rejected")] == ["checkpoint-4"]
        (folder / ".complete").write_bytes(b"")
        running.committed("checkpoint-4")
        assert running.terminate() == 0


def test_a_link_out_of_the_checkpoint_is_refused_not_followed(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        (running.volume / "checkpoint-1").mkdir()
        (running.volume / "checkpoint-1/passwd").symlink_to("/etc/passwd")
        (running.volume / "checkpoint-1/.complete").touch()
        (running.volume / "checkpoint-2").mkdir()
        (running.volume / "checkpoint-2/folder").symlink_to("/etc")
        (running.volume / "checkpoint-2/.complete").touch()
        (running.volume / "checkpoint-3").symlink_to("/etc")
        rejected = until(lambda: r if len(r := running.status()["rejected"]) == 3 else None)
        assert all("symbolic link" in why for why in rejected.values())
        assert not (tmp_path / "store/checkpoint-1").exists()


@ON_ONE_STORE
def test_the_newest_of_a_backlog_becomes_durable_first(place: Place, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    for step in (10, 20, 30):
        write_checkpoint(volume, f"checkpoint-{step}", FILES)
    with sidecar(volume, place.settings) as running:
        for step in (10, 20, 30):
            running.committed(f"checkpoint-{step}")
        order = [event["step"] for event in running.events("checkpoint_committed")]
        assert order == [30, 20, 10]


def test_a_just_in_time_checkpoint_overtakes_one_under_way_which_is_finished_later(place: Place, tmp_path: Path) -> None:
    settings = place.settings | {"CKPT_BANDWIDTH_LIMIT": "10MB/s", "CKPT_PART_SIZE": "5Mi", "CKPT_CONCURRENCY": "1"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": big(30_000_000)})
        until(lambda: running.events("checkpoint_uploading"))
        write_checkpoint(running.volume, "checkpoint-12", {"model": big(1_000_000, 2)}, {"reason": "jit"})
        running.committed("checkpoint-12")
        assert [e["checkpoint"] for e in running.events("checkpoint_committed")] == ["checkpoint-12"]
        running.committed("checkpoint-10")
        again = running.events("checkpoint_uploading")[-1]
        assert again["checkpoint"] == "checkpoint-10"
        assert again["already_sent_bytes"] > 0
        assert place.read("checkpoint-10/model") == big(30_000_000)


@ON_ONE_STORE
def test_the_trainers_own_rotation_cannot_take_a_finished_checkpoint_away(place: Place, tmp_path: Path) -> None:
    settings = place.settings | {"CKPT_BANDWIDTH_LIMIT": "10MB/s"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        folder = write_checkpoint(running.volume, "checkpoint-10", {"model": big(12_000_000)})
        until(lambda: running.events("checkpoint_finished"))
        subprocess.run(["rm", "-r", str(folder)], check=True)
        running.committed("checkpoint-10")
        assert place.read("checkpoint-10/model") == big(12_000_000)
        until(lambda: not list((running.volume / ".ckpt/pins").iterdir()), what="pins released")


@ON_EACH_KIND
def test_kill_9_in_mid_upload_continues_and_sends_little_twice(place: Place, tmp_path: Path) -> None:
    content = big(60_000_000)
    settings = place.settings | {"CKPT_BANDWIDTH_LIMIT": "20MB/s", "CKPT_PART_SIZE": "5Mi", "CKPT_CONCURRENCY": "2"}
    volume = tmp_path / "volume"
    with sidecar(volume, settings) as first:
        first.ready()
        write_checkpoint(volume, "checkpoint-10", {"model": content})
        sent = until(lambda: s if (s := sum(t["sent_bytes"] for t in first.status()["queue"])) > 20_000_000 else None)
        first.kill()
    assert keys.commit("checkpoint-10") not in place.keys("")
    with sidecar(volume, place.settings) as second:
        second.committed("checkpoint-10")
        assert second.events("checkpoint_uploading")[0]["already_sent_bytes"] >= sent
        assert place.read("checkpoint-10/model") == content
        assert place.unfinished_uploads() == []
        assert second.terminate() == 0


def test_without_its_journal_a_restart_loses_nothing(place: Place, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, place.settings) as first:
        first.ready()
        write_checkpoint(volume, "checkpoint-10", FILES)
        first.committed("checkpoint-10")
        before = place.store.stat(keys.commit("checkpoint-10"))
        first.kill()
    subprocess.run(["rm", "-r", str(volume / ".ckpt/journal")], check=True)
    with sidecar(volume, place.settings) as second:
        second.committed("checkpoint-10")
        assert place.store.stat(keys.commit("checkpoint-10")) == before
        assert second.status()["sent_bytes"] == 0


@ON_EACH_KIND
def test_a_step_written_anew_by_a_later_attempt_replaces_the_old_one(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume-1", place.settings) as first:
        first.ready()
        marker = {"attempt": "a-1", "created_at": "2026-01-01T00:00:00Z"}
        write_checkpoint(first.volume, "checkpoint-10", {"model": b"old", "only-old": b"x"}, marker)
        first.committed("checkpoint-10")
    with sidecar(tmp_path / "volume-2", place.settings | {"CKPT_RESUME": "off"}) as second:
        second.ready()
        marker = {"attempt": "a-2", "created_at": "2026-01-02T00:00:00Z"}
        write_checkpoint(second.volume, "checkpoint-10", {"model": b"new"}, marker)
        second.committed("checkpoint-10")
        commit = json.loads(place.read(keys.commit("checkpoint-10")))
        assert commit["attempt"] == "a-2"
        assert place.read("checkpoint-10/model") == b"new"
        assert "checkpoint-10/only-old" not in place.keys("checkpoint-10/")


def test_a_step_of_an_earlier_attempt_does_not_replace_what_came_later(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        write_checkpoint(
            running.volume, "checkpoint-10", {"m": b"new"}, {"attempt": "a-2", "created_at": "2026-01-02T00:00:00Z"}
        )
        running.committed("checkpoint-10")
        write_checkpoint(
            running.volume, "checkpoint-10", {"m": b"old"}, {"attempt": "a-1", "created_at": "2026-01-01T00:00:00Z"}
        )
        [event] = until(lambda: running.events("checkpoint_superseded"))
        assert "a-2" in event["reason"]
        assert place.read("checkpoint-10/m") == b"new"


def test_a_checkpoint_rewritten_under_the_same_name_is_uploaded_again(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"m": b"one"})
        running.committed("checkpoint-10")
        time.sleep(0.05)
        write_checkpoint(running.volume, "checkpoint-10", {"m": b"two"})
        until(lambda: len(running.events("checkpoint_committed")) == 2)
        assert place.read("checkpoint-10/m") == b"two"


def test_a_marker_that_a_shell_writes_in_two_steps_is_read_whole(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        folder = running.volume / "checkpoint-5"
        folder.mkdir()
        (folder / "m").write_bytes(b"x")
        with (folder / ".complete").open("w") as marker:
            marker.flush()
            time.sleep(0.1)
            marker.write('{"attempt": ')
            marker.flush()
            time.sleep(0.1)
            marker.write('"whole"}')
        assert running.committed("checkpoint-5")["attempt"] == "whole"
        assert running.events("checkpoint_rejected") == []


@ON_ONE_STORE
@pytest.mark.slow
def test_a_step_that_lost_its_commit_and_is_not_sent_again_in_time_is_not_reported_as_durable(
    place: Place, tmp_path: Path
) -> None:
    with sidecar(tmp_path / "volume", place.settings | {"CKPT_GRACE_SECONDS": "4"}) as running:
        running.ready()
        for step in (10, 20):
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": big(3_000_000, step), "rng": b"1"})
            running.committed(f"checkpoint-{step}")
        running.call("POST", "/v1/bandwidth", {"limit": "20KB/s"})
        place.store.delete([keys.commit("checkpoint-20"), "checkpoint-20/model"])
        until(lambda: running.status()["newest_durable_step"] == 10, what=lambda: running.log()[-3000:])
        assert running.terminate() != 0
        assert [each["checkpoint"] for each in running.report["given_up"]] == ["checkpoint-20"]
        assert running.report["newest_durable_step"] == 10


@ON_ONE_STORE
@pytest.mark.slow
def test_with_skip_an_older_step_that_was_damaged_is_superseded_and_the_next_pod_knows_it(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings | {"CKPT_SUPERSEDED": "skip"}) as running:
        running.ready()
        for step in (10, 20):
            write_checkpoint(running.volume, f"checkpoint-{step}", {"model": big(3_000_000, step), "rng": b"1"})
            running.committed(f"checkpoint-{step}")
        place.store.put("checkpoint-10/model", b"of another pod")
        until(lambda: states(running)["checkpoint-10"] == "superseded", what=lambda: running.log()[-3000:])
        until(lambda: [key for key in place.keys("checkpoint-10/") if "quarantine" in key], what=lambda: place.keys())
        assert running.terminate() == 0
        assert running.report["newest_durable_step"] == 20
        assert "checkpoint-10" in running.report["bad"]
    with sidecar(tmp_path / "next", place.settings | {"CKPT_RESUME": "on-demand"}) as running:
        running.ready()
        assert running.resume()["checkpoint"] == "checkpoint-20"
        assert "not the object that its writer recorded" in str(running.resume("checkpoint-10")["passed_over"])


def states(running: Sidecar) -> dict[str, str]:
    return {each["name"]: each["state"] for each in running.call("GET", "/v1/checkpoints")["checkpoints"]}
