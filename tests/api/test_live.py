"""The overview and its stream, over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sidecar.api.guard import MOST_UNDER_WAY
from sidecar.api.overview import MOST_CHECKPOINTS
from sidecar.api.page import TYPES
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import Commit, Manifest, ManifestEntry, NodeOf, encode
from tests.api.training import training
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint
from trainer_hook.contract import Node

WEB = Path(__file__).parents[2] / "sidecar/api/web"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("live")
    with sidecar(folder / "volume", {"CKPT_STORE": f"file://{folder / 'store'}"}) as started:
        yield started.ready()


def get(port: int, path: str, headers: Mapping[str, str] = {}) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


class Viewer:
    """A client of the stream."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._connection.request("GET", "/v1/live")
        self.answer = self._connection.getresponse()

    def next(self) -> tuple[str, Any]:
        """Return name and data of the next event."""
        name = ""
        while True:
            line = self.answer.readline().decode()
            assert line, "the stream ended"
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: "):
                return name, json.loads(line[6:])

    def close(self) -> None:
        self.answer.close()
        self._connection.close()


def commit_steps(folder: Path, steps: range) -> None:
    """Write commits of one node without files into a store."""
    for step in steps:
        name, node = f"checkpoint-{step}", Node(0, 1)
        raw = encode(Manifest(name=name, step=step, attempt="a", node=NodeOf(index=0, count=1), files=()))
        key = keys.manifest(name, "a", node)
        entry = ManifestEntry(key=key, size_bytes=len(raw), crc64nvme=checksum.text_of(raw))
        commit = Commit(name=name, step=step, attempt="a", created_at="2026-01-01T00:00:00Z", manifests=(entry,))
        for path, content in ((key, raw), (keys.commit(name), encode(commit))):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def test_the_page_and_its_files_are_served_and_nothing_else(running: Sidecar) -> None:
    status, headers, body = get(running.port, "/", {"Accept": "text/html,application/xhtml+xml"})
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<!doctype html>" in body
    assert get(running.port, "/")[2].startswith(b"checkpoint-sidecar "), "curl gets text"
    assert {path.name for path in WEB.iterdir()} == {*TYPES, "index.html"}
    for name, kind in TYPES.items():
        status, more, _ = get(running.port, f"/page/{name}")
        assert (status, more["content-type"]) == (200, kind)
        assert "'unsafe" not in more["content-security-policy"]
    for name in ("page.py", "..%2fapp.py", "%2e%2e/app.py", "index.html", ""):
        assert get(running.port, f"/page/{name}")[0] == 404
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_scripts_never_turn_text_into_elements_and_load_nothing_from_elsewhere() -> None:
    for path in WEB.iterdir():
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "style=", "onclick"):
            assert word not in text, f"{path.name}: {word}"
        assert "https://" not in text
        assert text.replace("http://www.w3.org/2000/svg", "").count("http://") == 0


def test_a_page_of_another_site_gets_neither_page_nor_overview(running: Sidecar) -> None:
    for path in ("/", "/page/page.js", "/v1/overview", "/v1/live"):
        assert get(running.port, path, {"Host": "rebound.example:9470"})[0] == 421
        assert get(running.port, path, {"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_all_viewers_get_each_change_and_a_sign_of_life(running: Sidecar) -> None:
    viewers = [Viewer(running.port) for _ in range(3)]
    firsts = [viewer.next() for viewer in viewers]
    assert {name for name, _ in firsts} == {"overview"}
    write_checkpoint(running.volume, "checkpoint-7", {"m": b"x"}, {})
    for viewer in viewers:
        overview = firsts[0][1]
        while not any(c["name"] == "checkpoint-7" and c["state"] == "committed" for c in overview["checkpoints"]):
            overview = viewer.next()[1]
        assert overview["durable"]["step"] == 7
    before_s = time.monotonic()
    viewers[0].next()
    viewers[0].next()
    assert time.monotonic() - before_s < 25, "a sign of life each 5 s"
    for viewer in viewers:
        viewer.close()


def test_viewers_are_bounded_and_take_no_place_of_other_streams(running: Sidecar) -> None:
    viewers = [Viewer(running.port) for _ in range(MOST_UNDER_WAY["viewer"])]
    assert {viewer.answer.status for viewer in viewers} == {200}
    extra = Viewer(running.port)
    assert extra.answer.status == 503
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("GET", "/v1/events")
    events = connection.getresponse()
    assert events.status == 200
    events.close()
    connection.close()
    for viewer in (*viewers, extra):
        viewer.close()
    assert until(lambda: get(running.port, "/v1/overview")[0] == 200)


def test_the_last_event_is_the_end(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as ending:
        ending.ready()
        viewer = Viewer(ending.port)
        viewer.next()
        ending.process.terminate()
        name = ""
        while name != "ended":
            name, _ = viewer.next()
        assert ending.wait() == 0
        viewer.close()


def test_before_training_has_begun_nothing_is_at_risk(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as alone:
        alone.ready()
        assert alone.status()["at_risk"]["seconds_at_risk"] is None, "without a hook nothing shows whether it has begun"
        with training(alone.volume) as trainer:  # its script imports its libraries
            until(lambda: alone.status()["safety"]["headline"] == "Training has not begun")
            time.sleep(1.5)
            now = alone.status()
            assert (now["at_risk"]["seconds_at_risk"], now["at_risk"]["grows"]) == (0, False)
            assert now["safety"]["kill"] == now["safety"]["sigterm"] == {"lost": "nothing", "why": "training has not begun"}
            trainer.at(0)
            until(lambda: alone.status()["at_risk"]["grows"])


def test_what_is_at_risk_stands_still_when_the_trainer_has_ended(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as alone:
        alone.ready()
        with training(alone.volume) as trainer:
            trainer.at(10)
            trainer.save(10)
            alone.committed("checkpoint-10")
            trainer.at(14)
            until(lambda: (alone.status()["at_risk"]["seconds_at_risk"] or 0) > 0.5)
            running = alone.status()["at_risk"]
            assert (running["grows"], running["steps_at_risk"]) == (True, 4)
        ended = until(lambda: r if not (r := alone.status()["at_risk"])["grows"] else None)
        time.sleep(1.5)
        assert alone.status()["at_risk"]["seconds_at_risk"] == ended["seconds_at_risk"] == 0
        assert alone.status()["at_risk"]["steps_at_risk"] == 0
        assert alone.call("GET", "/v1/overview")["safety"]["headline"].startswith("Nobody trains")


def test_checkpoints_that_left_the_volume_stay_in_the_overview(tmp_path: Path) -> None:
    # On demand: a prefetch on a slow machine comes after the first commit, chooses it, and so keeps it on the volume.
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_KEEP_LOCAL": "1", "CKPT_RESUME": "on-demand"}
    with sidecar(tmp_path / "volume", settings) as rotating:
        rotating.ready()
        for step in (1, 2, 3):
            write_checkpoint(rotating.volume, f"checkpoint-{step}", {"m": os.urandom(8)}, {"reason": "periodic"})
            rotating.committed(f"checkpoint-{step}")
        until(lambda: not (rotating.volume / "checkpoint-1").exists())
        found = until(
            lambda: (
                found
                if not (found := {c["name"]: c for c in rotating.call("GET", "/v1/overview")["checkpoints"]})["checkpoint-1"][
                    "on_volume"
                ]
                else None
            )
        )
        assert [*found] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
        assert found["checkpoint-1"]["in_store"]
        assert found["checkpoint-1"]["save_reason"] == "periodic"


@pytest.mark.slow
def test_a_bucket_of_5000_checkpoints_costs_a_viewer_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    commit_steps(store, range(1, 5001))
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{store}", "CKPT_RESUME": "off"}) as full:
        full.ready()
        assert full.call("GET", "/v1/overview")["earlier"]["state"] == "unread", "nobody watches: the store is not read"
        took_s = []
        for _ in range(3):  # beside other tests
            began_s = time.monotonic()
            assert get(full.port, "/", {"Accept": "text/html"})[0] == 200
            viewer = Viewer(full.port)
            viewer.next()
            took_s.append(time.monotonic() - began_s)
            viewer.close()
        assert min(took_s) < 1.0
        viewer = Viewer(full.port)
        overview: Any = {"earlier": {"state": "reading"}}
        while overview["earlier"]["state"] != "read":
            overview = viewer.next()[1]
        viewer.close()
        assert overview["earlier"]["folders"] == 5000
        assert [c["step"] for c in overview["checkpoints"]] == list(range(5000, 5000 - MOST_CHECKPOINTS, -1))
        assert overview["durable"] == {
            "name": "checkpoint-5000",
            "step": 5000,
            "created_at": "2026-01-01T00:00:00Z",
            "committed_at": None,
            "by_this_pod": False,
        }
