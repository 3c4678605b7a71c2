"""Many small files: a thread takes several one after another, and nobody is to notice but by the clock."""

from __future__ import annotations

import random
from pathlib import Path

from sidecar.core.format import keys
from tests.process.conftest import Place
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint

FILES = {f"part-{n % 7}/file-{n:03}": random.Random(n).randbytes(n * 97 % 20_000) for n in range(150)}
TOTAL_BYTES = sum(map(len, FILES.values()))


def test_each_arrives_and_comes_back_whole(place: Place, tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", place.settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", FILES)
        running.committed("checkpoint-10")
        assert running.status()["sent_bytes"] == TOTAL_BYTES
    with sidecar(tmp_path / "new-volume", place.settings) as running:
        answer = running.up().resume()
        assert (answer["state"], answer["checkpoint"]) == ("ready", "checkpoint-10")
        assert contents(running.volume / "checkpoint-10") == FILES


def test_what_was_sent_before_a_kill_is_not_sent_again(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_RESUME": "off", "CKPT_CONCURRENCY": "4"}
    with sidecar(tmp_path / "volume", settings | {"CKPT_BANDWIDTH_LIMIT": "800kB/s"}) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", FILES)
        until(lambda: running.status()["sent_bytes"] > TOTAL_BYTES / 3)
        sent_bytes = running.status()["sent_bytes"]
        running.process.kill()
        running.process.wait()
    with sidecar(tmp_path / "volume", settings) as running:
        running.committed("checkpoint-10")
        already = running.events("checkpoint_uploading")[0]["already_sent_bytes"]
        assert sent_bytes <= already < TOTAL_BYTES
        assert running.status()["sent_bytes"] == TOTAL_BYTES - already


def test_a_newer_checkpoint_does_not_wait_for_the_rest(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {"CKPT_STORE": f"file://{store}", "CKPT_BANDWIDTH_LIMIT": "300kB/s", "CKPT_CONCURRENCY": "2"}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", FILES)
        until(lambda: running.status()["sent_bytes"] > 0)
        write_checkpoint(running.volume, "checkpoint-20", {"model": b"newer"})
        running.committed("checkpoint-20")
        assert not (store / keys.commit("checkpoint-10")).exists()
        paused = running.events("checkpoint_paused")
        assert [event["checkpoint"] for event in paused] == ["checkpoint-10"]
        running.command("limit", "none")
        running.committed("checkpoint-10")
        assert {path: (store / "checkpoint-10" / path).read_bytes() for path in FILES} == FILES
