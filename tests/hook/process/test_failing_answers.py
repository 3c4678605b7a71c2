"""Each request of a training to its sidecar, failing once in each way: it resumes as without the failure, and never lies."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.failing_sidecar import FAULTS, failing_sidecar
from trainer_hook.contract import Marker
from trainer_hook.process import client as client_module
from trainer_hook.process import durable_wait
from trainer_hook.process.client import Client
from trainer_hook.process.durable_wait import wait_until_durable
from trainer_hook.process.rank_consensus import RankConsensus
from trainer_hook.process.settings import from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.volume.checkpoint_folder import finish

GOING_ON: Any = SimpleNamespace(notice_at_s=None)
LIFE = [
    *("POST /v1/resume", "GET /v1/resume/1", "GET /v1/resume/1"),  # the newest, which lacks a file
    *("GET /v1/checkpoints", "POST /v1/resume", "GET /v1/resume/2"),
    *("POST /v1/flush", "GET /v1/status", "POST /v1/flush"),
]
QUICKER = 50
"""By how much the limits of single calls are shorter here."""


class Answers:
    """A sidecar with ``checkpoint-5`` and ``checkpoint-10``, the newest. It downloads them to the volume."""

    def __init__(self, volume: Path) -> None:
        self._volume = volume
        self._wanted = ""
        self._asked: Counter[str] = Counter()

    def __call__(self, call: str, body: Any) -> tuple[int, Any]:
        self._asked[call] += 1
        if call == "POST /v1/resume":
            self._wanted = "checkpoint-10" if body["checkpoint"] == "latest" else body["checkpoint"]
            return 202, {"state": "choosing", "id": "1" if self._wanted == "checkpoint-10" else "2"}
        if call == "GET /v1/resume/1" and self._asked[call] == 1:
            return 200, {"id": "1", "state": "downloading", "checkpoint": "checkpoint-10"}
        if call.startswith("GET /v1/resume/"):
            self._download(self._wanted)
            return 200, {"state": "ready", "checkpoint": self._wanted, "source": "store"}
        if call == "GET /v1/checkpoints":
            return 200, {"checkpoints": [{"name": "checkpoint-10"}, {"name": "checkpoint-5"}]}
        if call == "GET /v1/status":
            return 200, {"degraded": False}
        if self._asked[call] == 1:
            return 504, {"title": "Not durable", "missing": [{"checkpoint": "checkpoint-20", "state": "uploading"}]}
        return 200, {"durable": ["checkpoint-20"]}

    def _download(self, name: str) -> None:
        (self._volume / name).mkdir(exist_ok=True)
        (self._volume / name / "model").write_bytes(b"weights")
        finish(self._volume / name, Marker(step=int(name.split("-")[1])))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Client._call

    def call(self: Client, *asked: Any, timeout_s: float) -> Any:
        return real(self, *asked, timeout_s=timeout_s / QUICKER)

    monkeypatch.setattr(Client, "_call", call)
    monkeypatch.setattr(client_module, "_RETRY_S", 0.01)
    quick = SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: time.sleep(s / QUICKER))
    monkeypatch.setattr(durable_wait, "time", quick)


def missing(files: Any, **_: Any) -> list[str]:
    return []


@pytest.mark.parametrize("fault", FAULTS)
def test_one_answer_that_fails_changes_neither_the_resume_nor_the_end(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for which in itertools.count(1):
        (volume := tmp_path / str(which)).mkdir()
        with failing_sidecar(Answers(volume), which, fault) as sidecar:
            settings = from_environment({"CKPT_DIR": str(volume), "CKPT_SIDECAR_URL": sidecar.url})
            client = Client(settings.sidecar_url, volume)

            def lacks(folder: Path) -> None:
                if folder.name == "checkpoint-10":
                    raise OSError("it lacks a file")

            began_s = time.monotonic()
            choice = Resumer(settings, client, RankConsensus(), missing=missing, check=lacks).choose(0)
            assert choice is not None, (sidecar.failed, capsys.readouterr().err)
            assert choice.name == "checkpoint-5", (sidecar.failed, capsys.readouterr().err)
            assert wait_until_durable(client, GOING_ON) is None, (sidecar.failed, capsys.readouterr().err)
            assert time.monotonic() - began_s < 20
        assert sidecar.asked[-1] == "POST /v1/flush"
        assert "everything is durable" in capsys.readouterr().err
        if sidecar.failed is None:
            assert sidecar.asked == LIFE
            break
