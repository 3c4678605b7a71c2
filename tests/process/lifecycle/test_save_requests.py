"""Saves on request: asked, answered, durable; or why not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.process.sidecar_process import Sidecar, sidecar, until, write_checkpoint

TRAINER = """
import os, sys, time, pathlib
from trainer_hook.volume import lease
from trainer_hook.process.save_requests import SaveRequests
volume = pathlib.Path(sys.argv[1])
assert lease.hold(volume, 0)
requests, outcome, step = SaveRequests(volume), sys.argv[2], 10
print("held", flush=True)
while True:
    time.sleep(0.05)
    if outcome != "silent" and (asked := requests.poll()):
        if outcome == "dies":
            sys.exit(1)
        step += 10
        name = f"checkpoint-{step}"
        if outcome == "saves":
            (volume / name).mkdir()
            (volume / name / "model").write_bytes(os.urandom(3_000_000))
            (volume / name / ".complete").write_text('{"reason": "manual"}')
        requests.answer(name, saved=outcome == "saves")
"""


@contextmanager
def pod(tmp_path: Path, outcome: str, **more: str) -> Iterator[Sidecar]:
    """A sidecar, and a trainer that answers requests in one way."""
    volume = tmp_path / "volume"
    volume.mkdir()
    command = [sys.executable, "-c", TRAINER, str(volume), outcome]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    assert trainer.stdout.readline() == "held\n"
    try:
        with sidecar(volume, {"CKPT_STORE": f"file://{tmp_path / 'store'}"} | more) as running:
            yield running.ready()
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


def asked(running: Sidecar, **body: Any) -> Any:
    return running.call("POST", "/v1/save", body)


@pytest.mark.slow
def test_a_save_on_request_reports_back_when_it_is_durable(tmp_path: Path) -> None:
    with pod(tmp_path, "saves", CKPT_BANDWIDTH_LIMIT="1MB/s") as running:
        first = asked(running)
        assert (first["http_status"], first["state"], first["action"]) == (202, "asked", "save")
        told = running.call("GET", f"/v1/save/{first['id']}?wait_s=20")
        assert (told["state"], told["checkpoint"]) == ("durable", "checkpoint-20")
        assert (tmp_path / "store/checkpoint-20/.complete").exists()
        done = running.command("save")
        assert done.returncode == 0, done.stderr
        assert "checkpoint-30 is durable" in done.stdout
        assert "saved: checkpoint-30" in done.stderr
        at_once = running.command("save", "--no-wait", "--json")
        assert at_once.returncode == 0
        assert json.loads(at_once.stdout)["state"] == "asked"
        assert running.events("save_durable")


def test_a_trainer_that_cannot_save_says_so(tmp_path: Path) -> None:
    with pod(tmp_path, "refuses") as running:
        done = running.command("save", "--timeout", "20")
        assert done.returncode == 3
        assert "could not save" in done.stdout
        assert running.events("save_failed")


def test_a_trainer_that_does_not_answer_is_said_not_to(tmp_path: Path) -> None:
    with pod(tmp_path, "silent") as running:
        first = asked(running)
        done = running.command("save", "--timeout", "1.5")
        assert done.returncode == 3
        assert "asked: save" in done.stdout
        # Who asks again joins; to stop is another thing, and answers the first one, too.
        assert asked(running)["id"] == first["id"]
        assert asked(running, stop=True)["id"] != first["id"]
        problem = running.call("GET", "/v1/save/nobody-asked-this")
        assert problem["http_status"] == 404


def test_a_trainer_that_ends_instead_of_answering_has_failed(tmp_path: Path) -> None:
    with pod(tmp_path, "dies") as running:
        told = running.call("POST", "/v1/save?wait_s=20", {})
        assert (told["state"], told["detail"]) == ("failed", "the trainer ended without an answer")


def test_a_request_outlives_the_sidecar(tmp_path: Path) -> None:
    with pod(tmp_path, "silent") as running:
        first = asked(running)
        running.kill()
        (running.volume / ".ckpt/answer.json").write_text(
            json.dumps({"id": first["id"], "outcome": "saved", "checkpoint": "checkpoint-70"})
        )
        write_checkpoint(running.volume, "checkpoint-70", {"model": b"x"}, {"reason": "manual"})
        with sidecar(running.volume, {"CKPT_STORE": f"file://{tmp_path / 'store'}"}) as again:
            again.ready()
            told = again.call("GET", f"/v1/save/{first['id']}?wait_s=20")
            assert (told["state"], told["checkpoint"]) == ("durable", "checkpoint-70")


def test_who_waits_for_a_save_is_answered_when_the_sidecar_ends(tmp_path: Path) -> None:
    with pod(tmp_path, "silent", CKPT_GRACE_SECONDS="1") as running:
        first, answers = asked(running), []

        def wait() -> None:
            answers.append(running.call("GET", f"/v1/save/{first['id']}?wait_s=50"))

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.3)
        running.terminate()
        waiting.join(10)
        assert until(lambda: answers)[0]["state"] == "asked"
