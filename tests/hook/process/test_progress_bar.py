"""A progress bar on a terminal, lines elsewhere, nothing on other ranks."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.hook.job import ROOT, Answers, plain_environ
from tests.hook.process.test_client import in_turn
from trainer_hook.process.client import Client
from trainer_hook.process.progress_bar import Bar, is_watched

DOWNLOADS = """
from trainer_hook.process import progress_bar
{missing}
bar = progress_bar.bar()
print(bool(bar))
for done in (0, 500_000_000, 2_000_000_000):
    bar({{"state": "downloading", "checkpoint": "checkpoint-7", "done_bytes": done, "total_bytes": 2_000_000_000}})
bar.close()
"""
WITHOUT_TQDM = "import sys\nsys.modules['tqdm'] = sys.modules['tqdm.auto'] = None"


def on_a_terminal(code: str, **environ: str) -> str:
    """Return what a process writes whose standard error is a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    environment = plain_environ() | {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | environ
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=theirs, stderr=theirs):
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 4096)
            except OSError:  # the last one has closed it
                break
    os.close(ours)
    return seen.decode()


@pytest.mark.parametrize("missing", ["", WITHOUT_TQDM], ids=["tqdm", "rich"])
def test_a_terminal_is_shown_a_bar(missing: str) -> None:
    seen = on_a_terminal(DOWNLOADS.format(missing=missing))
    assert seen.startswith("True")
    assert "[checkpoint] checkpoint-7" in seen
    assert "2.00G" in seen or "2.0 GB" in seen or "2.0/2.0 GB" in seen
    assert "Traceback" not in seen


def test_another_rank_and_one_without_either_library_are_shown_nothing() -> None:
    assert on_a_terminal(DOWNLOADS.format(missing=""), RANK="1") == "False\r\n"
    nothing = WITHOUT_TQDM + "\nsys.modules['rich'] = None"
    assert on_a_terminal(DOWNLOADS.format(missing=nothing)) == "False\r\n"


def test_a_log_is_given_lines_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_watched({})
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_watched({})
    assert not is_watched({"RANK": "3"})


def test_one_download_after_the_other_is_drawn_as_it_is_told(answers: Answers, volume: Path) -> None:
    drawn: list[Any] = []

    def make(title: str, total: int) -> Any:
        drawn.append((title, total))
        return drawn.append

    def going(name: str, done: int) -> Any:
        return 200, {"state": "downloading", "checkpoint": name, "done_bytes": done, "total_bytes": 4}

    answers.by_call["POST /v1/resume"] = (202, {"state": "choosing"})
    answers.by_call["GET /v1/resume"] = in_turn(
        going("checkpoint-7", 1), going("checkpoint-7", 3), going("checkpoint-5", 2), (200, {"state": "none"})
    )
    Client(answers.url, volume).resume("latest", train_call=0, timeout_s=9, tell=pytest.fail, bar=Bar(make))
    assert drawn == [("[checkpoint] checkpoint-7", 4), 1, 3, -1, ("[checkpoint] checkpoint-5", 4), 2, -1]
