"""What a terminal and a pipe see of a long command."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from typing import Any

import pytest

from sidecar.cli import checkpoints, direct, progress, requests
from sidecar.cli.app import invoke
from sidecar.cli.client import Refused
from sidecar.cli.main import exit_code, main
from sidecar.cli.output import COMPLETE
from sidecar.errors import (
    AccessRefused,
    ConfigurationError,
    CorruptObject,
    Fenced,
    NothingFound,
    RequestRefused,
    StoreUnavailable,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_a_line_now_and_then_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.shown("pull") as on_progress:
        on_progress("checkpoint-40\x1b[2J", 0, 4 << 20)
        time.sleep(0.02)
        on_progress("checkpoint-40\x1b[2J", 1 << 20, 4 << 20)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("checkpoint-sidecar pull: checkpoint-40\\x1b[2J: 1.05 MB of 4.19 MB, ")
    assert last.endswith(" s left")


def test_a_terminal_gets_a_bar_and_no_colour_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    for no_color, is_coloured in (("", True), ("1", False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("NO_COLOR", no_color) if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
        with progress.shown("pull") as on_progress:
            on_progress("checkpoint-40 [bold]", 1 << 20, 4 << 20)
        shown = terminal.getvalue()
        assert "checkpoint-40 [bold]" in shown
        assert ("\x1b[38;5" in shown or "\x1b[32m" in shown or "\x1b[35m" in shown) is is_coloured


def test_watch_redraws_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, shown = Terminal(), []

    class Once:
        def __init__(self, **_: Any) -> None:
            return

        def get(self, _: str) -> str:
            shown.append("status")
            if len(shown) > 2:
                raise KeyboardInterrupt
            return "one\ntwo"

    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(direct, "Client", Once)
    monkeypatch.setattr("sidecar.cli.render.status_text", lambda answer: answer)
    monkeypatch.setattr(direct.time, "sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        direct.status(watch=True)
    assert terminal.getvalue() == 2 * "\x1b[Hone\x1b[K\ntwo\x1b[K\n\x1b[J"


def test_flush_shows_the_queue_while_it_waits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = threading.Event()

    class Slow:
        def __init__(self, **_: Any) -> None:
            return

        def post(self, *_: Any) -> Any:
            assert seen.wait(20)
            return {"durable": ["checkpoint-40"]}

        def get(self, _: str) -> Any:
            seen.set()
            return {"queue": [{"sent_bytes": 1 << 20, "size_bytes": 2 << 20}]}

    monkeypatch.setattr(requests, "Client", Slow)
    monkeypatch.setattr(requests, "PROGRESS_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    assert main(["flush"]) == 0
    out, err = capsys.readouterr()
    assert out == "durable: checkpoint-40\n"
    assert "uploading: 1.05 MB of 2.1 MB" in err


@pytest.mark.parametrize(("state", "code"), [("ready", 0), ("none", 5), ("failed", 1)])
def test_resume_tells_nothing_to_resume_from_apart(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    class Answers:
        def __init__(self, **_: Any) -> None:
            return

        def post(self, _: str, body: Any) -> Any:
            asked.append(body["checkpoint"])
            path = "/volume/checkpoint-40" if state == "ready" else None
            passed = [{"checkpoint": "checkpoint-50", "reason": "damaged"}]
            return {"state": state, "path": path, "passed_over": passed, "detail": "d"}

    monkeypatch.setattr(checkpoints, "Client", Answers)
    assert main(["resume", "40", "--timeout", "2m"]) == code
    assert asked == ["checkpoint-40"]
    said = capsys.readouterr()
    assert said.out == ("" if code else "/volume/checkpoint-40\n")  # for $(checkpoint-sidecar resume)
    assert "passed over checkpoint-50: damaged\n" in said.err
    assert main(["resume", "40", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert (answer["state"], answer.get("exit_code", 0)) == (state, code)
    assert ("error" in answer) is bool(code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("a"), 2),
        (AccessRefused("a"), 2),
        (NothingFound("a"), 5),
        (StoreUnavailable("a"), 6),
        (RequestRefused("a"), 7),
        (Fenced("a"), 7),
        (Refused(404, {}), 5),
        (Refused(409, {}), 7),
        (CorruptObject("k", want="a", got="b"), 8),
    ],
)
def test_exit_codes_tell_errors_apart(error: Exception, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("arguments", "near"), [(["verfy"], "verify"), (["ls", "--jsno"], "--json"), (["prune", "s3://b", "--kep", "1"], "--keep")]
)
def test_the_nearest_command_or_option_is_named(arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert near in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion(shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["completion", shell]) == 0
    assert f"{COMPLETE}=complete_{shell}" in capsys.readouterr().out
    monkeypatch.setenv(COMPLETE, f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "checkpoint-sidecar ver")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "checkpoint-sidecar ver")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert invoke([]) == 0
    assert "verify" in capsys.readouterr().out
