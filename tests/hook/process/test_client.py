"""The trainer's client of the local API: every answer, and none, leads to a clear message."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.job import Answers
from tests.ports import free_port
from tests.process.sidecar_process import sidecar, write_checkpoint
from trainer_hook.process import client as client_module
from trainer_hook.process.answers import ResumeResult
from trainer_hook.process.client import Client, FlushResult, SidecarAbsent


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ABSENT_AFTER_S", 0.3)
    monkeypatch.setattr(client_module, "_RETRY_S", 0.02)


def resume(answers: Answers, volume: Path, *, timeout_s: float = 5.0, train_call: int | None = 0) -> ResumeResult:
    said: list[str] = []
    return Client(answers.url, volume).resume("latest", train_call=train_call, timeout_s=timeout_s, tell=said.append)


def older(client: Client, than_step: int) -> list[str]:
    return list(client.older_checkpoints(than_step, timeout_s=5, tell=print))


def in_turn(*answered: Any) -> Callable[[Any], Any]:
    """ResumeResult one after the other, the last one for ever."""
    left = list(answered)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]


def test_ready_names_the_checkpoint_its_source_and_what_was_passed_over(answers: Answers, volume: Path) -> None:
    passed = [{"checkpoint": "checkpoint-9", "reason": "truncated"}]
    ready = {"state": "ready", "checkpoint": "checkpoint-7", "source": "store", "meta": {"base_step": 3}, "passed_over": passed}
    answers.by_call["POST /v1/resume"] = (202, ready)
    assert resume(answers, volume) == ResumeResult("checkpoint-7", "store", {"base_step": 3}, (("checkpoint-9", "truncated"),))
    asked = {"checkpoint": "latest", "train_call": 0, "asked_by": "trainer"}
    assert answers.asked == [("POST /v1/resume", "Bearer none", asked)]


def test_any_train_call_is_asked_for_by_not_naming_one(answers: Answers, volume: Path) -> None:
    resume(answers, volume, train_call=None)
    assert answers.asked[0][2] == {"checkpoint": "latest", "asked_by": "trainer"}


def test_none_is_known_to_be_nothing(answers: Answers, volume: Path) -> None:
    answer = resume(answers, volume)
    assert answer.checkpoint is None
    assert answer.known


def test_failed_is_not_known(answers: Answers, volume: Path) -> None:
    answers.by_call["POST /v1/resume"] = (202, {"state": "failed", "detail": "the volume is full"})
    answer = resume(answers, volume)
    assert (answer.checkpoint, answer.known, answer.detail) == (None, False, "the volume is full")


def test_time_for_which_the_trainer_was_stopped_does_not_make_the_sidecar_absent(
    answers: Answers, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that was suspended while the pod started: the training began from scratch."""
    starting = 503, {"detail": "starts"}
    ready = 202, {"state": "ready", "checkpoint": "checkpoint-7"}
    answers.by_call["POST /v1/resume"] = in_turn(starting, starting, ready)
    real, stops = time.sleep, [0.6]
    monkeypatch.setattr(client_module.time, "sleep", lambda pause_s: real(pause_s + (stops.pop() if stops else 0.0)))
    assert resume(answers, volume).checkpoint == "checkpoint-7"


def test_a_download_is_waited_for(answers: Answers, volume: Path) -> None:
    going = {"state": "downloading", "checkpoint": "checkpoint-7", "done_bytes": 1, "total_bytes": 2}
    answers.by_call["POST /v1/resume"] = (202, {"state": "choosing"})
    answers.by_call["GET /v1/resume"] = in_turn(
        (200, going), (200, going), (200, {"state": "ready", "checkpoint": "checkpoint-7"})
    )
    assert resume(answers, volume).checkpoint == "checkpoint-7"
    assert [call for call, _, _ in answers.asked] == ["POST /v1/resume", *["GET /v1/resume"] * 3]


def test_only_the_answer_to_the_own_request_counts(answers: Answers, volume: Path) -> None:
    answers.by_call["POST /v1/resume"] = (202, {"state": "choosing", "id": "ab12"})
    answers.by_call["GET /v1/resume"] = (200, {"state": "ready", "checkpoint": "checkpoint-1"})
    answers.by_call["GET /v1/resume/ab12"] = (200, {"state": "ready", "checkpoint": "checkpoint-7", "id": "ab12"})
    assert resume(answers, volume).checkpoint == "checkpoint-7"


def test_a_sidecar_that_starts_again_and_knows_no_request_is_asked_again(answers: Answers, volume: Path) -> None:
    choosing = [(202, {"state": "choosing", "id": identifier}) for identifier in "12"]
    answers.by_call["POST /v1/resume"] = in_turn(*choosing)
    answers.by_call["GET /v1/resume/1"] = (404, {"title": "No such request", "detail": "POST /v1/resume again"})
    answers.by_call["GET /v1/resume/2"] = (200, {"state": "ready", "checkpoint": "checkpoint-7", "id": "2"})
    assert resume(answers, volume).checkpoint == "checkpoint-7"


def test_a_sidecar_that_is_older_than_the_hook_is_asked_in_its_words(answers: Answers, volume: Path) -> None:
    refused = (422, {"title": "Invalid request", "detail": "asked_by: Extra inputs are not permitted"})
    answers.by_call["POST /v1/resume"] = lambda asked: (
        refused if "asked_by" in asked else (202, {"state": "ready", "checkpoint": "checkpoint-7"})
    )
    assert resume(answers, volume).checkpoint == "checkpoint-7"


def test_an_answer_that_takes_too_long_says_which_setting_to_raise(answers: Answers, volume: Path) -> None:
    def slowly(asked: Any) -> Any:
        time.sleep(0.05)
        return 200, {"state": "downloading", "checkpoint": "checkpoint-7"}

    answers.by_call |= {"POST /v1/resume": slowly, "GET /v1/resume": slowly}
    answer = resume(answers, volume, timeout_s=0.4)
    assert not answer.known
    assert "CKPT_RESUME_TIMEOUT_S" in (answer.detail or "")


def test_progress_is_told_now_and_then(answers: Answers, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0.0, 6.0)
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=time.sleep))
    going = {"state": "downloading", "checkpoint": "checkpoint-7", "done_bytes": 1e9, "total_bytes": 4e9}
    answers.by_call["POST /v1/resume"] = (202, {"state": "choosing", "detail": "the store is not reached yet"})
    answers.by_call["GET /v1/resume"] = in_turn((200, going), (200, {"state": "none"}))
    said: list[str] = []
    Client(answers.url, volume).resume("latest", train_call=0, timeout_s=100, tell=said.append)
    assert said[0] == "waiting for the checkpoint to resume from: the store is not reached yet"
    assert said[1:] == ["downloading checkpoint-7, 25 % of 4.00 GB"]


def test_nobody_there_is_absent_after_a_while(volume: Path) -> None:
    client = Client(f"http://127.0.0.1:{free_port()}", volume)
    began_s = time.monotonic()
    with pytest.raises(SidecarAbsent, match=re.escape(client._url)):
        client.resume("latest", train_call=0, timeout_s=60, tell=print)
    assert 0.3 <= time.monotonic() - began_s < 5
    for call in (lambda: client.flush(timeout_s=1), client.degraded):
        with pytest.raises(OSError, match="refused"):
            call()
    with pytest.raises(SidecarAbsent, match="refused"):
        older(client, 5)


def test_one_that_was_absent_is_waited_for_only_shortly_the_next_time(
    answers: Answers, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ABSENT_AFTER_S", 1.5)
    monkeypatch.setattr(client_module, "ABSENT_STILL_AFTER_S", 0.1)
    client, took_s = Client(f"http://127.0.0.1:{free_port()}", volume), []
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(SidecarAbsent):
            client.resume("latest", train_call=0, timeout_s=60, tell=print)
        took_s.append(time.monotonic() - began_s)
    assert took_s[0] > 1.5 > took_s[1]
    client._url = answers.url
    assert client.resume("latest", train_call=0, timeout_s=60, tell=print).known
    assert client._patience_s is None, "once it is there, it is waited for as before"


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        (200, b"<html>"),
        (200, b"[1, 2]"),
        (200, b"\xff\xfe"),
        (500, b"oops"),
        (500, b"[]"),
        (401, {"title": "Unauthorized", "detail": "bearer token missing"}),
    ],
    ids=repr,
)
def test_garbage_is_never_taken_for_an_answer(garbage: Any, answers: Answers, volume: Path) -> None:
    for call in list(answers.by_call):
        answers.by_call[call] = garbage
    client = Client(answers.url, volume)
    with pytest.raises(SidecarAbsent):
        resume(answers, volume)
    with pytest.raises(SidecarAbsent):
        older(client, 5)
    for ask in (lambda: client.flush(timeout_s=1), client.degraded):
        with pytest.raises(OSError, match=r"."):
            ask()


@pytest.mark.parametrize("state", [None, "melting", 7])
def test_a_state_that_is_not_known_is_not_an_answer(state: Any, answers: Answers, volume: Path) -> None:
    answers.by_call["POST /v1/resume"] = (202, {"state": state})
    with pytest.raises(SidecarAbsent):
        resume(answers, volume)


def test_a_sidecar_that_starts_late_or_restarts_is_waited_for(
    answers: Answers, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ABSENT_AFTER_S", 5.0)
    refused = (401, {"detail": "bearer token missing"})
    answers.by_call["POST /v1/resume"] = in_turn(refused, b"", (202, {"state": "choosing"}))
    answers.by_call["GET /v1/resume"] = in_turn(b"", (200, {"state": "ready", "checkpoint": "checkpoint-7"}))
    assert resume(answers, volume).checkpoint == "checkpoint-7"


def test_the_token_on_the_volume_is_sent_with_every_call(answers: Answers, volume: Path) -> None:
    (volume / ".ckpt").mkdir()
    (volume / ".ckpt/token").write_text("secret\n")
    client = Client(answers.url, volume)
    assert client.flush(timeout_s=1) == FlushResult()
    assert client.degraded() is None
    assert [token for _, token, _ in answers.asked] == ["Bearer secret"] * 2


def test_the_sidecar_of_another_volume_is_not_asked(volume: Path, tmp_path: Path) -> None:
    with sidecar(tmp_path / "other", {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as running:
        write_checkpoint(running.ready().volume, "checkpoint-5", {"m": b"x"})
        running.committed("checkpoint-5")
        client = Client(f"http://127.0.0.1:{running.port}", volume)
        for token in (None, "of-this-volume"):
            if token is not None:
                (volume / ".ckpt").mkdir()
                (volume / ".ckpt/token").write_text(token)
            with pytest.raises(SidecarAbsent, match=r"of this volume answers .*volume is .*/other.* CKPT_API_PORT"):
                client.resume("latest", train_call=0, timeout_s=5, tell=pytest.fail)
            with pytest.raises(OSError, match="CKPT_API_PORT"):
                client.flush(timeout_s=1)
        (volume / ".ckpt/token").write_text((running.volume / ".ckpt/token").read_text())
        assert client.resume("latest", train_call=0, timeout_s=5, tell=pytest.fail).checkpoint == "checkpoint-5"


def test_a_volume_that_is_gone_is_named(answers: Answers, volume: Path) -> None:
    client = Client(answers.url, volume / "unmounted")
    with pytest.raises(OSError, match=r"the volume .*/unmounted is not there any more"):
        client.flush(timeout_s=1)


def test_flush_tells_what_is_missing(answers: Answers, volume: Path) -> None:
    missing = [{"checkpoint": "checkpoint-5", "state": "uploading"}]
    answers.by_call["POST /v1/flush"] = (504, {"title": "Not durable yet", "detail": "1", "missing": missing})
    assert Client(answers.url, volume).flush(timeout_s=1) == FlushResult(missing=tuple(missing))


def test_degraded_gives_its_reason(answers: Answers, volume: Path) -> None:
    answers.by_call["GET /v1/status"] = (200, {"degraded": True, "degraded_reason": "no route"})
    assert Client(answers.url, volume).degraded() == "no route"


def test_older_checkpoints_are_named_newest_first(answers: Answers, volume: Path) -> None:
    known = [{"name": f"checkpoint-{n}", "step": n} for n in (5, 30, 20, 10)] + [{"name": "final", "step": None}]
    answers.by_call["GET /v1/checkpoints"] = (200, {"checkpoints": known})
    assert older(Client(answers.url, volume), 20) == ["checkpoint-10", "checkpoint-5"]


def test_many_older_checkpoints_are_asked_for_in_pages(answers: Answers, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, pages = Client(answers.url, volume), []
    real = client._call

    def call(method: str, path: str, body: Any, *, timeout_s: float) -> tuple[int, Any]:
        pages.append(path)
        before, limit = (int(part.split("=")[1]) for part in path.split("&")[1:])
        steps = sorted((step for step in range(0, 450, 10) if step < before), reverse=True)[:limit]
        answers.by_call["GET /v1/checkpoints"] = (
            200,
            {"checkpoints": [{"name": f"checkpoint-{step}", "step": step} for step in steps]},
        )
        return real(method, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(client, "_call", call)
    found = client.older_checkpoints(435, timeout_s=5, tell=pytest.fail)
    assert next(found) == "checkpoint-430"
    assert len(pages) == 1, "the next page is asked for only where all of this one was refused"
    assert list(found) == [f"checkpoint-{step}" for step in range(420, -1, -10)]
    assert len(pages) == 3


def test_a_sidecar_that_ends_while_its_store_is_away_is_waited_for_no_longer_than_any_other(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All GPUs waited for CKPT_RESUME_TIMEOUT_S."""
    client, calls = Client("http://127.0.0.1:9", volume), itertools.count()

    def call(*_: Any, **__: Any) -> tuple[int, Any]:
        if next(calls) > 0:
            raise ConnectionRefusedError("refused")
        return 503, {"detail": "the store does not answer"}

    monkeypatch.setattr(client, "_call", call)
    began_s = time.monotonic()
    with pytest.raises(SidecarAbsent, match="refused"):
        older(client, 20)
    assert time.monotonic() - began_s < 4


def test_a_proxy_in_the_environment_is_not_used(answers: Answers, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert resume(answers, volume).known


DEEP = b"[" * 100_000
NO_RESUME = [
    {},
    {"state": None},
    {"state": 7},
    {"state": "ready"},
    {"state": "ready", "checkpoint": 7},
    {"state": "ready", "checkpoint": "../x"},
    {"state": "ready", "checkpoint": "checkpoint-1", "meta": [1]},
    {"state": "none", "passed_over": 5},
    {"state": "none", "passed_over": [1]},
    {"state": "none", "passed_over": [{}]},
    {"state": "downloading", "done_bytes": "many"},
    [{"state": "none"}],
    DEEP,
]


@pytest.mark.parametrize("content", NO_RESUME, ids=str)
def test_json_of_another_form_is_no_answer_to_a_resume(content: Any, answers: Answers, volume: Path) -> None:
    """Another program on the port ended the training by its answer."""
    answers.by_call["POST /v1/resume"] = (202, content)
    with pytest.raises(SidecarAbsent):
        resume(answers, volume)


@pytest.mark.parametrize(
    ("call", "content"),
    [
        ("flush", {}),
        ("flush", {"missing": []}),
        ("room", {}),
        ("flush", {"missing": 5}),
        ("flush", {"missing": [1]}),
        ("flush", {"missing": [{}]}),
        ("flush", {"missing": [{"checkpoint": "checkpoint-1", "reason": 5}]}),
        ("flush", {"missing": [{"checkpoint": "checkpoint-1", "sent_bytes": "few"}]}),
        ("durable", {}),
        ("durable", {"durable": [5]}),
        ("room", {"deleted": 5}),
        ("room", {"deleted": [5]}),
        ("checkpoints", {}),
        ("checkpoints", {"checkpoints": 5}),
        ("checkpoints", {"checkpoints": [1]}),
        ("checkpoints", {"checkpoints": [{"step": 1}]}),
    ],
)
def test_json_of_another_form_is_no_answer_to_any_call(call: str, content: Any, answers: Answers, volume: Path) -> None:
    """The 504 of a proxy, without a checkpoint in it, ended the training as durable."""
    client = Client(answers.url, volume)
    answers.by_call |= {
        "POST /v1/flush": (504 if call == "flush" else 200, content),
        "POST /v1/room": (200, content),
        "GET /v1/checkpoints": (200, content),
    }
    calls: dict[str, Callable[[], Any]] = {
        "flush": lambda: client.flush(timeout_s=1),
        "durable": lambda: client.flush(timeout_s=1),
        "room": lambda: client.make_room(1, timeout_s=5),
        "checkpoints": lambda: older(client, 5),
    }
    with pytest.raises((OSError, SidecarAbsent), match="not an answer of the sidecar"):
        calls[call]()


@pytest.mark.parametrize("status", [200, 504])
def test_an_empty_answer_of_another_program_does_not_say_that_all_is_durable(
    status: int, answers: Answers, volume: Path
) -> None:
    """The training ended with exit code 0, and its last checkpoint was nowhere but on the volume."""
    answers.by_call |= {"POST /v1/flush": (status, {}), "GET /v1/status": (200, {})}
    client = Client(answers.url, volume)
    for call in (lambda: client.flush(timeout_s=1), client.degraded):
        with pytest.raises(OSError, match="not an answer of the sidecar"):
            call()
