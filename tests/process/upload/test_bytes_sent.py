"""What is sent when, and what need not be sent: early files, unchanged files, the limit of the bandwidth."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sidecar.core.format import keys
from tests import servers
from tests.marks import slow
from tests.process.conftest import ON_EACH_KIND, ON_ONE_STORE, Place
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

MIB = 1 << 20


def big(size_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def sent_early(running: Sidecar, size_bytes: int) -> None:
    """Wait until so much was sent of checkpoints that have no marker."""
    until(lambda: running.status()["sent_bytes"] >= size_bytes, what=lambda: f"sent early; log:\n{running.log()[-3000:]}")


def unfinished(running: Sidecar, content: bytes, *, name: str = "checkpoint-10") -> Path:
    folder = running.volume / name
    folder.mkdir()
    (folder / "model").write_bytes(content)
    return folder


def test_a_closed_file_is_sent_before_the_marker_which_only_confirms_it(place: Place, tmp_path: Path) -> None:
    content = big(40 * MIB)
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        folder = unfinished(running, content)
        sent_early(running, len(content))
        assert keys.commit("checkpoint-10") not in place.keys("")
        (folder / "rest").write_bytes(b"rest")
        (folder / ".complete").write_text("{}")
        running.committed("checkpoint-10")
        rest = running.events("checkpoint_uploading")[-1]["already_sent_bytes"] - len(content)
        assert rest in (0, 4), "the second file may go before its marker, too"
        assert running.status()["sent_bytes"] == len(content) + 4
        assert place.read("checkpoint-10/model") == content
        assert place.read("checkpoint-10/rest") == b"rest"


@ON_ONE_STORE
def test_a_file_that_was_written_again_after_it_was_sent_early_is_sent_again(place: Place, tmp_path: Path) -> None:
    before, after = big(20 * MIB), big(20 * MIB, 2)
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        folder = unfinished(running, before)
        sent_early(running, len(before))
        (folder / "model").write_bytes(after)
        (folder / ".complete").write_text("{}")
        running.committed("checkpoint-10")
        assert place.read("checkpoint-10/model") == after


@ON_ONE_STORE
def test_content_that_changed_without_a_trace_in_the_file_system_is_found_out(place: Place, tmp_path: Path) -> None:
    before = big(20 * MIB)
    after = before[:-1] + bytes([before[-1] ^ 1])
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        folder = unfinished(running, before)
        sent_early(running, len(before))
        seen = (folder / "model").stat()
        with (folder / "model").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(after[-1:])
        os.utime(folder / "model", ns=(seen.st_atime_ns, seen.st_mtime_ns))
        (folder / ".complete").write_text("{}")
        running.committed("checkpoint-10")
        assert place.read("checkpoint-10/model") == after


@pytest.mark.parametrize("place", ["file", *slow("moto"), *servers.REAL_STORES], indirect=True)
def test_a_large_file_that_is_half_sent_when_the_marker_comes_is_continued(place: Place, tmp_path: Path) -> None:
    content = big(60 * MIB)
    settings = place.settings | {"CKPT_BANDWIDTH_LIMIT": "40MB/s", "CKPT_PART_SIZE": "5Mi"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        folder = unfinished(running, content)
        sent_early(running, 15 * MIB)
        (folder / ".complete").write_text("{}")
        running.committed("checkpoint-10")
        assert running.status()["sent_bytes"] == len(content)
        assert place.read("checkpoint-10/model") == content
        assert place.unfinished_uploads() == []


@ON_ONE_STORE
def test_what_was_sent_of_a_checkpoint_that_is_never_finished_is_removed(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        folder = unfinished(running, big(20 * MIB))
        sent_early(running, 20 * MIB)
        shutil.rmtree(folder)
        left = running.volume / ".ckpt/journal"
        until(lambda: not list(left.glob("*early*")), what="given up")
        assert place.keys("checkpoint-10/") == []
        assert place.unfinished_uploads() == []


@ON_ONE_STORE
def test_nothing_is_sent_early_over_a_committed_step(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as first:
        write_checkpoint(first.volume, "checkpoint-10", {"model": b"committed"})
        first.committed("checkpoint-10")
    with sidecar(tmp_path / "volume-2", place.settings | {"CKPT_RESUME": "off"}) as second:
        second.ready()
        unfinished(second, big(20 * MIB))
        time.sleep(2.0)
        assert second.status()["sent_bytes"] == 0
        assert place.read("checkpoint-10/model") == b"committed"


@ON_EACH_KIND
def test_a_file_that_did_not_change_is_copied_in_the_store(place: Place, tmp_path: Path) -> None:
    frozen, changed = big(24 * MIB), {10: big(20 * MIB, 2), 20: big(20 * MIB, 3)}
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        for step, weights in changed.items():
            before = running.status()["sent_bytes"]
            write_checkpoint(running.volume, f"checkpoint-{step}", {"frozen": frozen, "weights": weights, "small": b"same"}, {})
            running.committed(f"checkpoint-{step}")
            sent = running.status()["sent_bytes"] - before
        assert sent == len(changed[20]) + len(b"same")
        assert place.read("checkpoint-20/frozen") == frozen
        assert place.read("checkpoint-20/weights") == changed[20]


def test_uploads_are_never_faster_than_their_limit(tmp_path: Path) -> None:
    size_bytes, limit = 60_000_000, 20_000_000
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_BANDWIDTH_LIMIT": "20MB/s"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": big(size_bytes)}, {})
        took_s = running.committed("checkpoint-10")["upload_s"]
        assert size_bytes / took_s <= limit * 1.1  # the start of the measurement is late by up to the process's turn


def test_a_limit_that_is_changed_applies_at_once(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_BANDWIDTH_LIMIT": "1MB/s"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": big(40_000_000)}, {})
        until(lambda: running.events("checkpoint_uploading"))
        assert running.call("POST", "/v1/bandwidth", {"limit": "fast"})["http_status"] == 422
        assert running.command("limit", "none").returncode == 0
        began_s = time.monotonic()
        running.committed("checkpoint-10")
        assert time.monotonic() - began_s < 10
        assert running.status()["bandwidth_limit_bytes_per_s"] is None


@pytest.mark.slow
def test_a_checkpoint_that_the_store_refuses_does_not_hold_up_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {"CKPT_STORE": f"file://{store}", "CKPT_CONCURRENCY": "1"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        (store / "checkpoint-10/a").mkdir(parents=True)  # a file of this name cannot be written
        write_checkpoint(running.volume, "checkpoint-10", {"a": b"refused", "b": b"x"}, {"reason": "jit"})
        until(lambda: running.events("store_degraded"))
        write_checkpoint(running.volume, "checkpoint-9", {"model": b"older"}, {})
        write_checkpoint(running.volume, "checkpoint-11", {"model": b"newer"}, {})
        running.committed("checkpoint-11")
        running.committed("checkpoint-9")
        (store / "checkpoint-10/a").rmdir()
        running.committed("checkpoint-10")


@pytest.mark.slow
def test_an_attempt_that_still_sends_what_a_later_one_has_committed_leaves_no_broken_commit(tmp_path: Path) -> None:
    store = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_RESUME": "on-demand"}
    contents = {attempt: {f"f{n}": attempt.encode() * 800 for n in range(6)} for attempt in ("a", "b")}
    markers = {"a": "2026-01-01T00:00:00Z", "b": "2026-01-01T01:00:00Z"}

    def write(volume: Path, attempt: str) -> None:
        write_checkpoint(volume, "checkpoint-20", contents[attempt], {"attempt": attempt, "created_at": markers[attempt]})

    with sidecar(tmp_path / "old", store | {"CKPT_BANDWIDTH_LIMIT": "300"}) as old:
        old.ready()
        write(old.volume, "a")
        until(lambda: old.events("checkpoint_uploading"))
        with sidecar(tmp_path / "new", store) as new:
            new.ready()
            write(new.volume, "b")
            new.committed("checkpoint-20")
            assert old.wait() == 4, "it was fenced when the new one took over"
            [ended] = old.report["given_up"]
            assert "a later pod of this job" in ended["reason"]
            # Its last request may have hit an object of the commit, which the new one then sends again.
            stored = tmp_path / "store/checkpoint-20"
            until(lambda: all((stored / name).read_bytes() == content for name, content in contents["b"].items()))
            new.committed("checkpoint-20")
            until(lambda: not new.status()["queue"])
            assert new.terminate() == 0
    with sidecar(tmp_path / "third", store) as third:
        answer = third.ready().resume()
        assert (answer["checkpoint"], answer["passed_over"]) == ("checkpoint-20", [])
        assert (third.volume / "checkpoint-20/f5").read_bytes() == contents["b"]["f5"]


def bodies_of(proxy: servers.Proxy, path: str) -> list[servers.Request]:
    return [seen for seen in proxy.seen if seen.method == "PUT" and urlsplit(seen.path).path.endswith(f"/{path}")]


@pytest.mark.parametrize("place", ["moto", *servers.REAL_STORES], indirect=True)
@pytest.mark.parametrize("is_other_pod", [False, True])
def test_a_step_that_is_written_again_sends_each_file_once(place: Place, tmp_path: Path, is_other_pod: bool) -> None:
    proxy, files = servers.Proxy(place.settings["AWS_S3_ENDPOINT"]), {f"small-{n}": b"1" for n in range(8)}
    with proxy.running() as endpoint:
        settings = place.settings | {"AWS_S3_ENDPOINT": endpoint, "CKPT_RESUME": "off"}

        def save(running: Sidecar, content: bytes, at: str) -> None:
            marker = {"attempt": f"attempt-{at}" if is_other_pod else "one", "save_id": at, "created_at": f"{at}T00:00:00Z"}
            its = dict.fromkeys(files, content) | {"large": content * (3 * MIB)}
            write_checkpoint(running.ready().volume, "checkpoint-10", its, marker)

        with sidecar(tmp_path / "volume", settings) as first:
            save(first, b"1", "2026-01-01")
            first.committed("checkpoint-10")
            assert {path: len(bodies_of(proxy, path)) for path in [*files, "large"]} == dict.fromkeys([*files, "large"], 1)
            assert all(seen.headers.get("If-None-Match") == "*" for seen in bodies_of(proxy, "large"))
            if not is_other_pod:
                save(first, b"2", "2026-01-02")
                until(lambda: len(first.events("checkpoint_committed")) == 2)
        if is_other_pod:
            with sidecar(tmp_path / "other", settings) as second:
                save(second, b"2", "2026-01-02")
                second.committed("checkpoint-10")
        assert place.read("checkpoint-10/large") == b"2" * (3 * MIB)
        assert {path: len(bodies_of(proxy, path)) for path in [*files, "large"]} == dict.fromkeys([*files, "large"], 2)
        assert "If-None-Match" not in bodies_of(proxy, "large")[1].headers
