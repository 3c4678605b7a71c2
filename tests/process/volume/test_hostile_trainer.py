"""Real sidecars beside a trainer that attacks them through the volume that they share."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.trainer.attacks import SECRET, exchange, exchanging, outside_of, state_of, stored_with
from tests.process.sidecar_process import Sidecar, contents, sidecar, until, write_checkpoint

ATTACK_S = 6.0


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    return {"CKPT_STORE": f"file://{tmp_path / 'store'}"}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return outside_of(tmp_path)


@pytest.fixture
def untouched(outside: Path) -> Callable[[], bool]:
    before = state_of(outside)
    return lambda: state_of(outside) == before


@pytest.mark.slow
def test_no_file_of_another_folder_reaches_the_store_while_checkpoints_are_exchanged_for_links(
    store: dict[str, str], outside: Path, tmp_path: Path
) -> None:
    (outside / "model").write_bytes(SECRET * 100)  # enough to be sent before there is a marker
    (outside / ".complete").unlink()
    with sidecar(tmp_path / "volume", store) as running:
        volume, pairs = running.ready().volume, []
        for step in range(1, 21):
            (volume / f"checkpoint-{step}").mkdir()
            (volume / f"checkpoint-{step}/model").write_bytes(b"own")
            (volume / f"link-{step}").symlink_to(outside)
            pairs.append((volume / f"checkpoint-{step}", volume / f"link-{step}"))
        ends_s = time.monotonic() + ATTACK_S
        with exchanging(*pairs):
            while time.monotonic() < ends_s:
                assert stored_with(tmp_path / "store", SECRET) == []
                time.sleep(0.02)
        write_checkpoint(volume, "checkpoint-1000", {"model": b"own"}, {})
        running.committed("checkpoint-1000")
        assert stored_with(tmp_path / "store", SECRET) == []


def with_links(system: Path, outside: Path) -> None:
    for name in ("pins", "journal", "ranks"):
        (system / name).symlink_to(outside)
    for name in ("terminating", "request.json", "answer.json", "trainer.json", "exit-report.json", "token", "lock", "pod.json"):
        (system / name).symlink_to(outside / "model")
    (system / "api.sock").symlink_to(outside / "model")
    (system / "incoming").mkdir()
    (system / "incoming/checkpoint-20").symlink_to(outside)
    (system / "incoming/partial").symlink_to(outside)
    (system / "incoming/stale").symlink_to(outside)


def with_fifos(system: Path, outside: Path) -> None:
    for name in ("pins", "journal", "ranks", "incoming/checkpoint-20/deep"):
        (system / name).mkdir(parents=True)
    names = ["terminating", "request.json", "answer.json", "trainer.json", "exit-report.json", "token", "lock", "pod.json"]
    journals = ["journal/checkpoint-777@early.jsonl", "journal/quarantine.json", "ranks/0.lease", "api.sock"]
    for name in [*names, *journals, "incoming/checkpoint-20/model", "incoming/partial", "../checkpoint-30/.complete"]:
        (system / name).parent.mkdir(exist_ok=True)
        os.mkfifo(system / name)
    (system / "incoming/checkpoint-20/deep/model").symlink_to(outside / "model")


@pytest.mark.parametrize("prepared", [with_links, with_fifos])
def test_a_volume_full_of_links_or_fifos_holds_nothing_up_and_leads_nowhere(
    prepared: Callable[[Path, Path], None],
    store: dict[str, str],
    outside: Path,
    untouched: Callable[[], bool],
    tmp_path: Path,
) -> None:
    files = {"model": b"weights" * 1000, "deep/model": os.urandom(3 << 20)}
    with sidecar(tmp_path / "first", store) as first:
        write_checkpoint(first.ready().volume, "checkpoint-20", files, {})
        first.committed("checkpoint-20")
        assert first.terminate() == 0
    volume = tmp_path / "volume"
    (volume / ".ckpt").mkdir(parents=True)
    prepared(volume / ".ckpt", outside)
    with sidecar(volume, store) as running:
        running.ready()
        assert running.resume()["checkpoint"] == "checkpoint-20"
        assert contents(volume / "checkpoint-20") == files
        write_checkpoint(volume, "checkpoint-40", {"model": b"own"}, {})
        running.committed("checkpoint-40")
        (volume / ".ckpt/other").symlink_to(outside)
        exchange(volume / ".ckpt/pins", volume / ".ckpt/other")  # the sidecar writes to it meanwhile
        write_checkpoint(volume, "checkpoint-50", {"model": b"own"}, {})
        running.committed("checkpoint-50")
        until(lambda: running.call("GET", "/v1/status")["phase"] == "running")
        assert running.terminate() in (0, 3)  # checkpoint-30 has a fifo for a marker
    assert untouched()
    assert any(event["path"].endswith(".ckpt/pins") for event in running.events("path_refused"))
    if prepared is with_links:
        assert {Path(event["path"]).name for event in running.events("not_a_directory")} == {"pins", "journal", "ranks"}


@pytest.mark.parametrize("has_state_dir", [False, True])
def test_a_forged_journal_deletes_nothing(has_state_dir: bool, store: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    settings = store | ({"CKPT_STATE_DIR": str(state)} if has_state_dir else {})
    volume = tmp_path / "volume"
    with sidecar(volume, settings | {"CKPT_KEEP_LOCAL": "1"}) as running:
        running.ready()
        for step in (10, 20):
            write_checkpoint(volume, f"checkpoint-{step}", {"model": b"weights"}, {})
            running.committed(f"checkpoint-{step}")
        running.kill()
    before = contents(tmp_path / "store")
    stored = [
        {
            "event": "stored",
            "stamp": "s",
            "first_crc": 1,
            "entry": {"path": f"f{n}", "key": key, "size_bytes": 1, "crc64nvme": "0" * 16},
        }
        for n, key in enumerate(["checkpoint-10/.complete", "checkpoint-10/model", "checkpoint-20/.complete", "run.json"])
    ]
    (volume / ".ckpt/journal").mkdir(exist_ok=True)
    for name in ("checkpoint-777@early.jsonl", "checkpoint-777@0123456789ab.jsonl"):
        (volume / ".ckpt/journal" / name).write_text("".join(json.dumps(line) + "\n" for line in stored))
    with sidecar(volume, settings) as running:
        running.ready()
        said = "journals_not_believed" if has_state_dir else "journal_lines_ignored"
        until(lambda: running.events(said))
        until(lambda: not (volume / ".ckpt/journal/checkpoint-777@early.jsonl").exists(), what="looked at")
        assert running.terminate() == 0
    after = contents(tmp_path / "store")
    assert {path for path in before if path not in after} == set()
    assert (tmp_path / "store/checkpoint-10/.complete").exists()
    assert (tmp_path / "store/checkpoint-20/.complete").exists()


def begun(volume: Path, settings: dict[str, str]) -> None:
    """Let a sidecar be killed in the middle of an upload."""
    with sidecar(volume, settings | {"CKPT_BANDWIDTH_LIMIT": "3MB/s"}) as running:
        running.ready()
        write_checkpoint(volume, "checkpoint-20", {"a": os.urandom(2 << 20), "model": os.urandom(4 << 20)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        until(lambda: sent(running) > 0)
        running.kill()


def sent(running: Sidecar) -> int:
    return sum(each["sent_bytes"] for each in running.status()["queue"])


@pytest.mark.slow
def test_what_the_sidecar_remembers_is_in_the_state_directory_alone_and_may_be_lost_with_its_pod(
    store: dict[str, str], tmp_path: Path
) -> None:
    volume, settings = tmp_path / "volume", {}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        settings[name] = store | {"CKPT_STATE_DIR": str(tmp_path / name)}
    begun(volume, settings["one"])
    assert not (volume / ".ckpt/journal").exists()
    assert not (volume / ".ckpt/pod.json").exists()
    assert (tmp_path / "one/pod.json").exists()
    [journal] = (tmp_path / "one/journal").glob("checkpoint-20@*.jsonl")
    assert journal.stat().st_size > 0
    # Its container starts again, and is killed again.
    with sidecar(volume, settings["one"] | {"CKPT_BANDWIDTH_LIMIT": "1"}) as running:
        [uploading] = until(lambda: running.events("checkpoint_uploading"))
        assert uploading["already_sent_bytes"] > 0
        running.kill()
    # Another pod, on the same lasting volume; the trainer rotates what it finished.
    wanted = contents(volume / "checkpoint-20")
    shutil.rmtree(volume / "checkpoint-20")
    with sidecar(volume, settings["other"]) as running:
        running.ready()
        running.committed("checkpoint-20")
        assert running.terminate() == 0
        assert running.report["durable"] == ["checkpoint-20"]
    found = contents(tmp_path / "store/checkpoint-20")
    assert {path: content for path, content in found.items() if not path.startswith(".ckpt/")} == wanted
    assert json.loads((tmp_path / "other/exit-report.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize("state", ["/proc", "nowhere", "volume/state"])
def test_a_state_directory_that_cannot_be_one_is_said_in_one_line(state: str, store: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "volume/state").mkdir(parents=True)
    with sidecar(tmp_path / "volume", store | {"CKPT_STATE_DIR": str(tmp_path / state)}) as running:
        assert running.wait() == 2
    [line] = [line for line in running.log().splitlines() if "CKPT_STATE_DIR" in line]
    assert f"CKPT_STATE_DIR={tmp_path / state}" in line
    assert "mount an emptyDir" in line


def make_too_deep(folder: Path, part: bytes) -> None:
    """Make folders inside each other, until their path is longer than any that the kernel takes."""
    folder.mkdir()
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(os.pathconf("/", "PC_PATH_MAX") // len(part) + 1):
        os.mkdir(part, dir_fd=fd)
        inner = os.open(part, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def test_text_that_is_no_text_silences_neither_the_api_nor_the_log(store: dict[str, str], tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    with sidecar(volume, store | {"PYTHONIOENCODING": "utf-8:strict"}) as running:
        running.ready()
        with (volume / ".ckpt/ranks/0.lease").open("wb") as lease:
            fcntl.lockf(lease, fcntl.LOCK_EX)
            asked = running.call("POST", "/v1/save", {})["id"]
            answer = {"id": asked, "outcome": "failed", "reason": "\x1b[31m" + "x" * 500_000}
            (volume / ".ckpt/answer.json").write_text(json.dumps(answer))
            until(lambda: running.events("save_failed"))
            detail = running.call("GET", f"/v1/save/{asked}")["detail"]
            assert detail.startswith(r"\x1b[31mx")
            assert len(detail) < 4000
        make_too_deep(volume / "checkpoint-1", b"\xff\x1b[31m" + b"x" * 200)
        (volume / "checkpoint-1/.complete").touch()
        until(lambda: running.events("checkpoint_rejected"))
        assert r"\udcff\x1b[31m" in running.call("GET", "/v1/checkpoints/checkpoint-1")["reason"]
        assert running.status()["http_status"] == 200
        assert "checkpoint-1" in running.command("ls").stdout
        assert running.terminate() == 3
        assert running.report["newest_rejected"].keys() == {"checkpoint-1"}
    assert not running.events("service_failed")
    assert not running.events("upload_defect")
    shutil.rmtree(volume / "checkpoint-1")
