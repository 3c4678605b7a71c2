"""The local API, spoken to over real sockets."""

from __future__ import annotations

import http.client
import json
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.cli import main
from tests.ports import free_port
from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

CALLS = {
    ("get", "/healthz"),
    ("get", "/readyz"),
    ("get", "/metrics"),
    ("get", "/"),
    ("get", "/v1/status"),
    ("get", "/v1/checkpoints"),
    ("get", "/v1/checkpoints/{name}"),
    ("get", "/v1/resume"),
    ("post", "/v1/resume"),
    ("get", "/v1/resume/{identifier}"),
    ("post", "/v1/flush"),
    ("post", "/v1/save"),
    ("get", "/v1/save/{identifier}"),
    ("post", "/v1/bandwidth"),
    ("post", "/v1/room"),
    ("post", "/v1/drain"),
    ("get", "/v1/events"),
    ("get", "/page/{name}"),
    ("get", "/v1/overview"),
    ("get", "/v1/live"),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("api")
    settings = {"CKPT_STORE": f"file://{folder / 'store'}", "CKPT_METRICS_BIND": f"127.0.0.1:{free_port()}"}
    with sidecar(folder / "volume", settings) as started:
        started.ready()
        write_checkpoint(started.volume, "checkpoint-5", {"m": b"x"})
        started.committed("checkpoint-5")
        yield started


def test_the_openapi_document_describes_every_call_and_its_errors(running: Sidecar) -> None:
    document = running.call("GET", "/openapi.json")
    assert {(method, path) for path, calls in document["paths"].items() for method in calls} == CALLS
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            assert call["summary"], f"{method} {path}"
            for status, answer in call["responses"].items():
                if status.startswith(("4", "5")):
                    assert "application/problem+json" in answer["content"], f"{method} {path} {status}"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/checkpoints/checkpoint-99", None, 404),
        ("GET", "/v1/checkpoints/%2e%2e", None, 404),
        ("GET", "/v1/checkpoints/a%00b", None, 404),
        ("DELETE", "/v1/status", None, 405),
        ("POST", "/v1/resume", {"checkpoint": "../../etc"}, 422),
        ("POST", "/v1/resume", {"chekpoint": "latest"}, 422),
        ("POST", "/v1/resume", {"asked_by": "nobody"}, 422),
        ("GET", "/v1/resume/0123abcd?wait_s=5", None, 404),
        ("POST", "/v1/flush", {"timeout_s": "soon"}, 422),
        ("POST", "/v1/flush", {"timeout_s": True}, 422),
        ("POST", "/v1/room", {"bytes": True}, 422),
        ("POST", "/v1/bandwidth", {"limit": True}, 422),
        ("POST", "/v1/bandwidth", {"limit": f"{'9' * 5000}GB/s"}, 422),
        ("POST", "/v1/bandwidth", {"limit": 10**400}, 422),
        ("POST", "/v1/bandwidth", {"limit": 1e300}, 422),
        ("POST", "/v1/room", {"bytes": 1 << 63}, 422),
        ("POST", "/v1/resume", {"train_call": False}, 422),
        ("POST", "/v1/resume", {"share": {"world_size": True, "ranks": [0]}}, 422),
        ("POST", "/v1/resume", {"share": {"world_size": 2, "ranks": [True]}}, 422),
        ("POST", "/v1/save", {}, 409),
        ("GET", "/v1/checkpoints?where=moon", None, 422),
    ],
)
def test_errors_are_problem_documents_that_say_what_to_do(
    method: str, path: str, body: object, status: int, running: Sidecar
) -> None:
    problem = running.call(method, path, body)
    assert (problem["http_status"], problem["status"]) == (status, status)
    assert problem["title"]
    assert len(problem["detail"]) > 20
    assert not running.status()["degraded"]


@pytest.mark.parametrize("body", [b"\xff", b"[" * 5000, b'{"\\ud800": 1}', b'{"x": ' * 3000, b'{"bytes": 1e999}'])
def test_a_body_that_is_no_json_is_the_callers_mistake(body: bytes, running: Sidecar) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{running.port}/v1/room", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    problem = json.loads(refused.value.read())
    refused.value.close()
    assert (refused.value.code, problem["status"], problem["title"]) == (422, 422, "Invalid request")


def test_a_person_and_the_trainer_get_the_answers_to_what_each_asked(running: Sidecar) -> None:
    asked = running.call("POST", "/v1/resume", {"checkpoint": "latest", "asked_by": "trainer"})
    by_hand = running.command("resume", "checkpoint-7", "--json")
    assert (by_hand.returncode, json.loads(by_hand.stdout)["requested"]) == (5, "checkpoint-7")
    assert running.answer(asked["id"])["checkpoint"] == "checkpoint-5"
    assert running.call("GET", "/v1/resume")["id"] == asked["id"]


def test_the_same_api_answers_on_the_unix_socket(running: Sidecar) -> None:
    path = running.volume / ".ckpt/api.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    connection = http.client.HTTPConnection("sidecar")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", "/healthz")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.close()


def test_flush_names_what_is_durable(running: Sidecar) -> None:
    assert running.call("POST", "/v1/flush", {"timeout_s": 5})["durable"] == ["checkpoint-5"]


def test_flush_that_is_not_in_time_names_what_is_missing(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_BANDWIDTH_LIMIT": "200000"}
    with sidecar(tmp_path / "volume", settings) as slow:
        slow.ready()
        write_checkpoint(slow.volume, "checkpoint-5", {"m": bytes(10_000_000)}, {})
        problem = slow.call("POST", "/v1/flush", {"timeout_s": 0.5})
        assert problem["http_status"] == 504
        assert [missing["checkpoint"] for missing in problem["missing"]] == ["checkpoint-5"]
        done = slow.command("flush", "--timeout", "0.2")
        assert done.returncode == 3
        assert "checkpoint-sidecar flush" in done.stderr


def test_flush_waits_for_a_checkpoint_that_starts_over(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_BANDWIDTH_LIMIT": "1000"}
    with sidecar(tmp_path / "volume", settings) as slow:
        slow.ready()
        folder = write_checkpoint(slow.volume, "checkpoint-20", {"a": b"x" * 1500, "b": b"x" * 1500}, {})
        until(lambda: slow.events("checkpoint_uploading"))
        answers: list[dict[str, object]] = []
        asking = threading.Thread(target=lambda: answers.append(slow.call("POST", "/v1/flush", {"timeout_s": 25})))
        asking.start()
        time.sleep(0.3)
        (folder / "b").write_bytes(b"y" * 1500)
        asking.join()
        # Sent anew or refused until its marker is written again: never passed over in silence.
        is_durable = bool(slow.events("checkpoint_committed"))
        assert (answers[0]["http_status"] == 200) == is_durable


def test_metrics_are_in_prometheus_format_and_alone_on_their_own_port(running: Sidecar) -> None:
    port = running.environ["CKPT_METRICS_BIND"].rpartition(":")[2]
    for base in (f"http://127.0.0.1:{running.port}", f"http://127.0.0.1:{port}"):
        with urllib.request.urlopen(f"{base}/metrics") as response:
            text = response.read().decode()
        assert "checkpoint_sidecar_newest_durable_step 5.0" in text
        assert 'checkpoint_sidecar_checkpoints{state="committed"} 1.0' in text
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status")
    refused.value.close()


def test_changing_calls_need_the_token_when_that_is_asked_for(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}", "CKPT_API_TOKEN": "required"}
    with sidecar(tmp_path / "volume", settings) as guarded:
        guarded.ready()
        assert guarded.call("POST", "/v1/flush", {})["http_status"] == 401
        assert guarded.call("POST", "/v1/flush", {}, token="wrong")["http_status"] == 401
        assert guarded.call("GET", "/v1/status")["http_status"] == 200
        path = guarded.volume / ".ckpt/token"
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert guarded.call("POST", "/v1/flush", {}, token=path.read_text())["http_status"] == 200
        assert guarded.command("flush").returncode == 0


def test_a_wrong_token_is_refused_also_where_none_is_required(running: Sidecar) -> None:
    for method, path, body in (("GET", "/v1/checkpoints", None), ("GET", "/v1/status", None), ("POST", "/v1/resume", {})):
        answer = running.call(method, path, body, token="of-another-volume")
        assert answer["http_status"] == 401
        assert str(running.volume) in answer["detail"]
        assert "CKPT_API_PORT" in answer["detail"]
    assert running.call("GET", "/healthz", token="of-another-volume")["http_status"] == 200


def test_events_are_streamed_and_missed_ones_are_given_again(running: Sidecar) -> None:
    def read(after: str | None, names: set[str]) -> list[tuple[int, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
        connection.request("GET", "/v1/events", headers={} if after is None else {"Last-Event-ID": after})
        response, found, number = connection.getresponse(), [], 0
        while not names <= {name for _, name in found}:
            line = response.readline().decode().strip()
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("event: "):
                found.append((number, line[7:]))
        connection.close()
        return found

    live: list[tuple[int, str]] = []
    reader = threading.Thread(target=lambda: live.extend(read(None, {"checkpoint_committed"})))
    reader.start()
    time.sleep(0.3)
    write_checkpoint(running.volume, "checkpoint-6", {"m": b"y"}, {})
    reader.join(10)
    assert [name for _, name in live][:2] == ["checkpoint_finished", "checkpoint_uploading"]
    assert "store_opened" not in {name for _, name in live}
    assert read("0", {"checkpoint_committed"})[0][0] == 1
    assert [e for e in read(str(live[0][0]), {"checkpoint_committed"}) if e[0] <= live[0][0]] == []


def test_the_api_answers_until_the_last_moment(tmp_path: Path) -> None:
    settings = {
        "CKPT_STORE": f"file://{tmp_path / 'store'}",
        "CKPT_BANDWIDTH_LIMIT": "4MB/s",
        "CKPT_GRACE_SECONDS": "20",
    }
    with sidecar(tmp_path / "volume", settings) as ending:
        ending.ready()
        write_checkpoint(ending.volume, "checkpoint-5", {"m": bytes(12_000_000)}, {})
        until(lambda: ending.events("checkpoint_uploading"))
        ending.process.terminate()
        status = until(lambda: s if (s := ending.status())["phase"] == "flushing" else None)
        assert status["termination"]["source"] == "sigterm"
        assert 0 < status["termination"]["deadline_in_s"] < 20
        assert ending.wait() == 0


def test_drain_returns_at_once_and_starts_the_clock(tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as ending:
        ending.ready()
        assert ending.command("drain").returncode == 0
        assert json.loads((ending.volume / ".ckpt/terminating").read_text())["source"] == "prestop"
        assert ending.status()["termination"]["source"] == "prestop"
        assert ending.process.poll() is None, "only SIGTERM ends it"
        assert ending.terminate() == 0


@pytest.mark.parametrize("command", [["status"], ["ls"], ["show", "checkpoint-5"], ["flush"], ["probe", "--ready"], ["resume"]])
def test_each_command_speaks_to_people_and_to_programs(command: list[str], running: Sidecar) -> None:
    done = running.command(*command)
    assert (done.returncode, done.stderr) == (0, "")
    if command[0] != "probe":
        assert done.stdout
        assert json.loads(running.command(*command, "--json").stdout)


def test_without_a_sidecar_a_command_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))
    monkeypatch.setenv("CKPT_API_PORT", str(free_port()))
    assert main.main(["probe"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "checkpoint-sidecar run" in said
