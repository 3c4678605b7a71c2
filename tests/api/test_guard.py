"""Who is answered on the local port, and how much anybody may ask for: real connections to a real sidecar."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from sidecar.api.guard import MOST_UNDER_WAY
from sidecar.serving import Connection
from tests.ports import free_port
from tests.process.sidecar_process import Sidecar, sidecar, until
from tests.processes import of_process

JSON = {"Content-Type": "application/json"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("guard")
    settings = {"CKPT_STORE": f"file://{folder / 'store'}", "CKPT_METRICS_BIND": f"127.0.0.1:{free_port()}"}
    with sidecar(folder / "volume", settings) as started:
        yield started.ready()


def ask(port: int, method: str, path: str, headers: Mapping[str, str] = {}, body: Any = None) -> tuple[int, Any]:
    """Return status and JSON of an answer to exactly these headers, of which ``Host`` may be one."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        assert not [name for name, _ in answer.getheaders() if name.lower().startswith("access-control-")]
        raw = answer.read()
        return answer.status, json.loads(raw) if "json" in (answer.getheader("content-type") or "") else raw


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "rebound.example:9470"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "localhost:8080"}, 200),
        ({"Host": "[::1]:9470"}, 200),
    ],
)
def test_a_name_or_a_page_that_is_not_ours_is_told_so(headers: dict[str, str], status: int, running: Sidecar) -> None:
    answered, problem = ask(running.port, "GET", "/v1/status", headers)
    assert answered == status
    if status != 200:
        assert set(problem) == {"type", "title", "status", "detail"}
    assert ask(running.port, "GET", "/healthz", headers)[0] == status


def test_a_post_without_a_header_that_pages_cannot_send_changes_nothing(running: Sidecar) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        status, problem = ask(running.port, "POST", "/v1/drain", headers, b"")
        assert status == 403
        assert "X-Checkpoint-Sidecar" in problem["detail"]
    assert ask(running.port, "OPTIONS", "/v1/drain", {"Origin": "http://evil.example"})[0] == 403
    assert running.status()["termination"] is None
    assert ask(running.port, "POST", "/v1/flush", JSON, b"{}")[0] == 200
    assert ask(running.port, "POST", "/v1/flush", {"X-Checkpoint-Sidecar": "1"}, b"{}")[0] != 403


def test_the_metrics_port_is_called_by_any_name(running: Sidecar) -> None:
    port = int(running.environ["CKPT_METRICS_BIND"].rpartition(":")[2])
    assert ask(port, "GET", "/metrics", {"Host": "10.0.0.7:9471"})[0] == 200
    assert ask(port, "GET", "/metrics", {"Origin": "http://evil.example"})[0] == 403


def memory_mib(running: Sidecar, name: str) -> float:
    return int(of_process(running.process.pid, "status").decode().partition(f"{name}:")[2].split()[0]) / 1024


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_300_mb_costs_no_memory(chunked: bool, running: Sidecar) -> None:
    before_mib = memory_mib(running, "VmHWM")
    with closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)) as connection:
        connection.putrequest("POST", "/v1/flush")
        connection.putheader("Content-Type", "application/json")
        connection.putheader(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(300 * MIB))))
        connection.endheaders()
        block = b"%x\r\n%s\r\n" % (MIB, bytes(MIB)) if chunked else bytes(MIB)
        for _ in range(300):
            connection.send(block)
        if chunked:
            connection.send(b"0\r\n\r\n")
        answer = connection.getresponse()
        assert answer.status == 413
        assert "bytes" in json.loads(answer.read())["detail"]
    assert memory_mib(running, "VmHWM") < before_mib + 30


def half_a_request(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether it was closed from the other side, with bytes unread (a reset) or without."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_that_never_finish_a_request_make_way_for_others(running: Sidecar) -> None:
    with ExitStack() as slow:
        held = [slow.enter_context(half_a_request(running.port)) for _ in range(Connection.most + 50)]
        assert ask(running.port, "GET", "/healthz")[0] == 200
        assert is_closed(held[0]), "the oldest"
        held[-1].sendall(b"no\r\n\r\n")
        assert held[-1].recv(12) == b"HTTP/1.1 200"


def test_streams_and_long_polls_leave_room_for_everything_else(running: Sidecar) -> None:
    with ExitStack() as held:

        def get(path: str) -> http.client.HTTPResponse:
            connection = held.enter_context(closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)))
            connection.request("GET", path)
            return connection.getresponse()

        assert [get("/v1/events").status for _ in range(MOST_UNDER_WAY["stream"])] == [200] * MOST_UNDER_WAY["stream"]
        refused = get("/v1/events")
        assert refused.status == 503
        assert "under way" in json.loads(refused.read())["detail"]
        for path in ("/healthz", "/readyz", "/metrics", "/v1/status", "/v1/resume?wait_s=0.1"):
            assert get(path).status == 200
        assert ask(running.port, "POST", "/v1/flush", JSON, b"{}")[0] == 200
    until(lambda: ask(running.port, "GET", "/v1/resume?wait_s=0")[0] == 200)


def test_the_head_of_a_request_is_bounded(running: Sidecar) -> None:
    assert ask(running.port, "GET", "/healthz", {"X-Long": "x" * 15_000})[0] == 200
    with closing(socket.create_connection(("127.0.0.1", running.port), timeout=30)) as endless:
        endless.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            endless.sendall(b"x" * 1000 * MIB)


def test_odd_requests_of_clients_are_not_in_the_log(running: Sidecar) -> None:
    before = len(running.log())
    for head in (b"GARBAGE", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b", b"GET / HTTP/1.1\r\nContent-Length: -1"):
        with closing(socket.create_connection(("127.0.0.1", running.port), timeout=30)) as client:
            client.sendall(head + b"\r\n\r\n")
            assert client.recv(20).startswith(b"HTTP/1.1 400")
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "eA==", "Sec-WebSocket-Version": "13"}
    assert ask(running.port, "GET", "/v1/status", upgrade)[0] == 200
    assert running.log()[before:] == ""


def test_an_older_hook_on_the_volume_goes_on_working(running: Sidecar) -> None:
    """Before there was a header of our own its POSTs had these."""
    headers = JSON | {"Authorization": f"Bearer {(running.volume / '.ckpt/token').read_text()}", "Connection": "close"}
    assert ask(running.port, "POST", "/v1/resume", headers, b'{"checkpoint": "latest", "train_call": 0}')[0] == 202
    assert ask(running.port, "POST", "/v1/flush", headers, b'{"timeout_s": 5}')[0] == 200


def test_the_unix_socket_is_called_by_any_name(running: Sidecar) -> None:
    path: Path = running.volume / ".ckpt/api.sock"
    with closing(http.client.HTTPConnection("whatever", timeout=30)) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("POST", "/v1/flush", b"{}", JSON)
        assert connection.getresponse().status == 200
