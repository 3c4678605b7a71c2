"""Two scripts that train one after the other in one container: each has checkpoints of its own."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.conftest import pod
from tests.hook.job import SCRIPTS, Training, marker, training
from tests.process.sidecar_process import until
from trainer_hook.contract import LEASES
from trainer_hook.process import earlier_scripts
from trainer_hook.process.earlier_scripts import Ended, last_ended, record


def command(folder: Path, name: str, **told: Any) -> list[str]:
    shutil.copy(SCRIPTS / "train.py", folder / name)
    return [sys.executable, str(folder / name), json.dumps(told)]


def optimizer(running: Training) -> list[str]:
    return re.findall(r"^optimizer .*$", running.log(), re.MULTILINE)


@pytest.mark.slow
def test_the_second_script_trains_its_own_model_and_resumes_it(tmp_path: Path, unhooked: Callable[..., str]) -> None:
    first = command(tmp_path, "first.py", args={"max_steps": 6})
    told = {"args": {"max_steps": 10, "learning_rate": 0.02}}
    second, slowly = command(tmp_path, "second.py", **told), command(tmp_path, "second.py", **told, sleep_s=0.1)
    settings, store = {"CKPT_SAVE_STEPS": "4"}, tmp_path / "store"
    with pod(tmp_path / "volume", store) as (sidecar, found):
        with training(first, tmp_path / "volume", found | settings) as running:
            assert running.wait() == 0, running.log()
            left = optimizer(running)
        with training(slowly, tmp_path / "volume", found | settings) as running:
            until(lambda: running.steps()[6:])
            assert running.steps()[0] == 1
            assert running.terminate() == 143, running.log()
            jit = f"checkpoint-{6 + running.steps()[-1]}"
        assert "first.py trained before in this container" in running.log()
        sidecar.committed(jit)
        assert marker(tmp_path / "volume", jit)["meta"]["train_call"] == 1
    with pod(tmp_path / "empty", store) as (_, found):
        with training(first, tmp_path / "empty", found | settings) as running:
            assert running.wait() == 0, running.log()
        assert "training had finished at checkpoint-6" in running.log()
        assert optimizer(running) == left, "for what the script does with it after train()"
        with training(second, tmp_path / "empty", found | settings) as running:
            assert running.wait() == 0, running.log()
        assert f"resumes from {jit}" in running.log()
        assert f"weights {running.weights()}" in unhooked(**told)


def is_running(monkeypatch: pytest.MonkeyPatch, script: str | None, container: str | None = "this") -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=script))
    monkeypatch.setattr(earlier_scripts, "_container", lambda: container)


def test_a_script_that_runs_again_has_its_own_place(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (volume / LEASES).mkdir(parents=True)
    for script, calls, steps in (("/a.py", 1, 6), ("/b.py", 3, 20)):
        is_running(monkeypatch, script)
        record(volume, calls=calls, steps=steps, attempt=script)
    for script, earlier in (
        ("/a.py", Ended()),
        ("/b.py", Ended("/a.py", 1, 6, "/a.py")),
        ("/c.py", Ended("/b.py", 3, 20, "/b.py")),
    ):
        is_running(monkeypatch, script)
        assert last_ended(volume) == earlier
    is_running(monkeypatch, "/a.py")
    record(volume, calls=1, steps=8, attempt="again")
    is_running(monkeypatch, "/b.py")
    assert last_ended(volume) == Ended("/a.py", 1, 8, "again")


@pytest.mark.parametrize(("script", "container"), [("/b.py", "another"), ("/b.py", None), (None, "this")])
def test_in_another_container_and_without_a_script_nothing_is_counted(
    script: str | None, container: str | None, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (volume / LEASES).mkdir(parents=True)
    is_running(monkeypatch, "/a.py")
    record(volume, calls=1, steps=6, attempt="a")
    is_running(monkeypatch, script, container)
    assert last_ended(volume) == Ended()
    record(volume, calls=1, steps=6, attempt="a")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"container": "this"}', '{"container": "this", "scripts": [{"script": 1}]}']
)
def test_a_record_that_cannot_be_read_counts_nothing(content: str, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (volume / LEASES).mkdir(parents=True)
    (volume / LEASES / "scripts.json").write_text(content)
    is_running(monkeypatch, "/b.py")
    assert last_ended(volume) == Ended()
    record(volume, calls=1, steps=6, attempt="b")
