"""Another program has the API's port: every command says so in one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.cli.main import main
from sidecar.core.lifecycle.exit_codes import EXIT_FAILED, EXIT_UNREACHABLE

JSON, HTML = b"content-type: application/json\r\n\r\n", b"content-type: text/html\r\n\r\n"
ANSWERS = {
    "an empty object": b"HTTP/1.1 200 OK\r\n" + JSON + b"{}",
    "other fields": b"HTTP/1.1 200 OK\r\n" + JSON + b'{"name": "registry", "version": "2"}',
    "a page": b"HTTP/1.1 200 OK\r\n" + HTML + b"<html><body>It works!</body></html>",
    "a page for an error": b"HTTP/1.1 404 Not Found\r\n" + HTML + b"<html>404</html>",
    "an error of another form": b"HTTP/1.1 404 Not Found\r\n" + JSON + b'{"error": {"code": 5}}',
    "no HTTP": b"220 mail.example ESMTP\r\n",
}
COMMANDS = (
    *("status", "status --json", "ls", "ls --json", "show checkpoint-5", "show 5 --json", "resume", "resume 5 --json"),
    *("flush", "flush --json", "save", "save --no-wait --json", "limit 5MB/s", "limit none --json", "drain", "drain --json"),
    *("probe", "probe --ready", "plan grace --measured"),
)


class Foreign:
    """Answers every connection alike."""

    def __init__(self) -> None:
        self.answer = b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(self.answer)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(10)


@pytest.fixture(scope="module")
def foreign() -> Iterator[Foreign]:
    running = Foreign()
    yield running
    running.close()


@pytest.mark.parametrize("kind", ANSWERS)
def test_each_command_says_in_one_line_that_another_program_answers(
    kind: str, foreign: Foreign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPT_DIR", str(tmp_path))
    monkeypatch.setenv("CKPT_API_PORT", str(foreign.port))
    monkeypatch.setattr("sidecar.cli.direct.STARTS_S", 0.0)
    foreign.answer = ANSWERS[kind]
    for command in COMMANDS:
        code = main(command.split())
        output, said = capsys.readouterr()
        assert code == (EXIT_FAILED if command.startswith("probe") else EXIT_UNREACHABLE), (command, said)
        assert said.count("\n") == 1, (command, said)
        assert "no sidecar" in said, (command, said)
        assert "CKPT_API_PORT" in said, (command, said)
        assert "--json" in command or not output, (command, output)
