"""Notices of the clouds, from a server that behaves as each of their metadata services does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sidecar.core.lifecycle.phases import margin_s
from sidecar.core.lifecycle.spot import SpotNotice
from sidecar.lifecycle import spot
from sidecar.lifecycle.spot import CLOUDS, PollResult, SpotWatch
from tests.catalog.test_volume_trouble import new_life
from tests.ports import free_port, served
from tests.process.sidecar_process import sidecar, until, write_checkpoint
from trainer_hook.contract import Notice, encode_notice, rfc3339


class Metadata:
    """What the services say. Each refuses what it would refuse, and counts what it was asked."""

    def __init__(self) -> None:
        self.action: dict[str, str] | None = None
        self.rebalance: dict[str, str] | None = None
        self.preempted = False
        self.changed = threading.Condition()
        self.events: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.url = ""

    def preempt(self) -> None:
        with self.changed:
            self.preempted = True
            self.changed.notify_all()

    def aws(self, method: str, path: str, headers: Any) -> tuple[int, bytes]:
        if path == "/latest/api/token":
            if method != "PUT" or "X-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 400, b""
            self.tokens.add(f"token-{len(self.tokens)}")
            return 200, f"token-{len(self.tokens) - 1}".encode()
        if headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, b""
        documents = {"spot/instance-action": self.action, "events/recommendations/rebalance": self.rebalance}
        found = documents.get(path.removeprefix("/latest/meta-data/"))
        return (404, b"<html>404 - Not Found</html>") if found is None else (200, json.dumps(found).encode())

    def gcp(self, query: dict[str, list[str]], headers: Any) -> tuple[int, bytes]:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, b""
        with self.changed:
            if query.get("wait_for_change") == ["true"] and query["last_etag"] == [self.etag]:
                self.changed.wait(float(query["timeout_sec"][0]))
        return 200, b"TRUE" if self.preempted else b"FALSE"

    @property
    def etag(self) -> str:
        return "2" if self.preempted else "1"

    def azure(self, path: str, query: dict[str, list[str]], headers: Any) -> tuple[int, bytes]:
        if headers.get("Metadata") != "true" or "api-version" not in query:
            return 400, b""
        if path == "/metadata/instance/compute/name":
            return 200, b"train_0"
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events}).encode()


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    said = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            place = urlsplit(self.path)
            said.asked.append(f"{self.command} {place.path}")
            if place.path.startswith("/latest"):
                status, content = said.aws(self.command, place.path, self.headers)
            elif place.path.startswith("/computeMetadata"):
                status, content = said.gcp(parse_qs(place.query), self.headers)
            else:
                status, content = said.azure(place.path, parse_qs(place.query), self.headers)
            self.send_response(status)
            self.send_header("ETag", said.etag)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = _answer  # noqa: N815 - the names that http.server looks for

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    said.url = f"http://127.0.0.1:{server.server_address[1]}"
    with served(server):
        yield said
        said.preempt()  # releases requests that still wait for a change


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_machine_that_stays_says_nothing(cloud: str, metadata: Metadata) -> None:
    assert CLOUDS[cloud](metadata.url).poll() == PollResult()


def test_the_token_is_kept_and_made_anew_when_it_is_refused(metadata: Metadata) -> None:
    aws = CLOUDS["aws"](metadata.url)
    aws.poll()
    aws.poll()
    assert metadata.asked.count("PUT /latest/api/token") == 1
    metadata.tokens = {"another"}
    assert aws.poll() == PollResult()


@pytest.mark.parametrize(
    ("cloud", "ends_in_s", "left_s"),
    [("aws", 100, 100), ("gcp", 0, 30), ("azure", 100, 100), pytest.param("aws", -300, 120, id="the clock is 7 min fast")],
)
def test_the_notice_of_each_cloud_begins_termination_and_reaches_the_trainer(
    cloud: str, ends_in_s: float, left_s: float, metadata: Metadata, tmp_path: Path
) -> None:
    settings = {
        "CKPT_STORE": f"file://{tmp_path / 'store'}",
        "CKPT_SPOT": cloud,
        "CKPT_GRACE_SECONDS": "5",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT" if cloud == "aws" else "CKPT_SPOT_ENDPOINT": metadata.url,
    }
    with sidecar(tmp_path / "volume", settings) as running:
        running.up()
        until(lambda: metadata.asked)
        assert running.status()["termination"] is None
        metadata.action = {"action": "terminate", "time": rfc3339(time.time() + ends_in_s)}
        metadata.events = [
            {
                "EventId": "1",
                "EventType": "Preempt",
                "Resources": ["train_0"],
                "EventStatus": "Scheduled",
                "NotBefore": formatdate(time.time() + ends_in_s, usegmt=True),
            }
        ]
        metadata.preempt()
        until(lambda: running.events("termination_noticed"))
        told = running.status()["termination"]
        assert told["source"] == "spot"
        # It is known when the machine goes, so the grace period of the pod is not what counts.
        assert told["deadline_in_s"] == pytest.approx(left_s, abs=15)
        assert json.loads((running.volume / ".ckpt/terminating").read_text())["source"] == "spot"
        assert not running.events("spot_metadata_unavailable")


HOLD_LEASE = (
    "import sys, time, pathlib; from trainer_hook.volume import lease; "
    "lease.hold(pathlib.Path(sys.argv[1]), 0); print('held', flush=True); time.sleep(60)"
)


def test_a_rebalance_recommendation_asks_for_a_save_and_ends_nothing(metadata: Metadata, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    metadata.rebalance = {"noticeTime": "2026-11-21T11:00:00Z"}
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_SPOT": "aws", "CKPT_SPOT_ENDPOINT": metadata.url}
    trainer = subprocess.Popen([sys.executable, "-c", HOLD_LEASE, str(volume)], stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout
        assert trainer.stdout.readline() == "held\n"
        with sidecar(volume, settings) as running:
            until(lambda: running.events("spot_rebalance_recommended"))
            until(lambda: (volume / ".ckpt/request.json").exists())
            assert json.loads((volume / ".ckpt/request.json").read_text())["action"] == "save"
            assert running.up().status()["termination"] is None
        trainer.kill()


def test_without_a_metadata_service_nothing_is_said_but_once_and_it_is_asked_ever_less(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_SPOT": "azure", "CKPT_SPOT_ENDPOINT": nobody}
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        until(lambda: running.events("spot_metadata_unavailable"))
        [said] = running.events("spot_metadata_unavailable")
        assert said["level"] == "info"
        assert not [e for e in running.events() if e.get("level") in ("warning", "error")]


async def test_each_notice_and_each_hint_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        PollResult(hint="a"),
        PollResult(SpotNotice("1", 5.0), "a"),
        OSError("away"),
        PollResult(SpotNotice("1", 4.0)),
        PollResult(hint="b"),
    ]

    class Scripted:
        poll_s = 1.0

        def poll(self) -> PollResult:
            now = said.pop(0)
            if isinstance(now, OSError):
                raise now
            return now

    monkeypatch.setitem(spot.CLOUDS, "aws", lambda endpoint: Scripted())
    services = new_life(tmp_path / "volume")
    watch = SpotWatch(
        "aws", None, termination=services.termination, save_requests=services.save_requests, events=services.events
    )
    notices: list[float | None] = []

    services.termination.observe(lambda: notices.append(services.termination.deadline.left_s()))
    rests = [await watch._poll() for _ in range(5)]
    [left_s] = notices
    assert left_s == pytest.approx(5.0 - margin_s(30.0), abs=0.5)
    assert not services.termination.deadline.is_within(3.0), "the same notice, told again with less time, is not a new one"
    hints = [event.fields["given_at"] for event in services.events.after(0) if event.name == "spot_rebalance_recommended"]
    assert hints == ["a", "b"]
    assert rests == [1.0, 1.0, spot.BACKOFFS_S[0], 1.0, 1.0]


@pytest.mark.parametrize("source", ["sigterm", "api", "prestop", "spot"])
def test_every_notice_goes_the_same_way_whoever_gives_it(source: str, metadata: Metadata, tmp_path: Path) -> None:
    settings = {
        "CKPT_STORE": f"file://{tmp_path / 'store'}",
        "CKPT_SPOT": "gcp",
        "CKPT_SPOT_ENDPOINT": metadata.url,
        "CKPT_BANDWIDTH_LIMIT": "1",  # what is pending stays so
    }
    with sidecar(tmp_path / "volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"x" * 500, "b": b"x" * 500}, {})
        until(lambda: running.events("checkpoint_uploading") and running.status()["phase"] == "running")
        match source:
            case "sigterm":
                running.process.send_signal(signal.SIGTERM)
            case "api":
                answer = running.call("POST", "/v1/drain", {})
                assert answer["phase"] == "draining"
                assert 0 < answer["deadline_in_s"] < 30
            case "prestop":
                # Whole at once, as the contract has it: an empty notice would count, too.
                written = running.volume / ".ckpt/terminating.tmp"
                written.write_bytes(encode_notice(Notice(rfc3339(time.time()), "prestop")))
                written.rename(running.volume / ".ckpt/terminating")
            case "spot":
                metadata.preempt()
        until(lambda: running.events("flush_planned") and running.status()["phase"] == "flushing")
        told = [e for e in running.events() if e["event"] in ("termination_noticed", "phase_changed")]
        assert [e["event"] for e in told] == ["phase_changed", "termination_noticed", "phase_changed"]
        _, noticed, changed = told
        assert noticed["source"] == source
        assert (changed["before"], changed["phase"]) == ("running", "flushing")
        for event in (noticed, changed):
            assert 0 < event["left_s"] <= 30
