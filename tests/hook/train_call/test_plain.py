"""A script that writes its own files, without a library: folder, marker and signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import ROOT, finished, marker, plain_environ, trainer_state, training
from tests.ports import free_port

SCRIPT = """
import sys, time
from trainer_hook.plain import latest, save, stopping
folder = latest()
first = int((folder / "state").read_text()) + 1 if folder else 1
for step in range(first, 21):
    print(f"rank 0 step {step}", flush=True)
    time.sleep(float(sys.argv[1]))
    stop = stopping()
    if stop or step % 5 == 0:
        assert save(step, lambda folder: (folder / "state").write_text(str(step)))
    if stop:
        sys.exit(143)
assert "torch" not in sys.modules
"""


def test_a_script_of_its_own_kind_saves_stops_and_continues(tmp_path: Path) -> None:
    command, store = [sys.executable, "-c", SCRIPT], tmp_path / "store"
    with pod(tmp_path / "first", store) as (sidecar, found), training([*command, "0.1"], tmp_path / "first", found) as first:
        first.at_step(7)
        assert trainer_state(first.volume)["step"] >= 5, "the step of a durable checkpoint was trained"
        assert first.terminate() == 143, first.log()
        last = first.steps()[-1]
        assert finished(first.volume) == ["checkpoint-5", f"checkpoint-{last}"]
        assert marker(first.volume, f"checkpoint-{last}")["reason"] == "jit"
        assert trainer_state(first.volume)["state"] == "preempted"
        sidecar.committed(f"checkpoint-{last}")
        assert sidecar.terminate() == 0
    with pod(tmp_path / "second", store) as (_, found), training([*command, "0"], tmp_path / "second", found) as second:
        assert second.wait() == 0, second.log()
        assert second.steps() == list(range(last + 1, 21))
        origin = {"step": last, "attempt": marker(tmp_path / "first", f"checkpoint-{last}")["attempt"]}
        assert marker(second.volume, "checkpoint-20")["meta"]["resumed_from"] == origin
        assert "everything is durable" in second.log()
        assert trainer_state(second.volume)["state"] == "succeeded"


RESUMES = "from trainer_hook.plain import latest, save, stopping; assert latest()"


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (RESUMES, "running"),
        (f"{RESUMES}; save(7, print)", "succeeded"),
        (f"{RESUMES}; stopping()", "succeeded"),
        ("from trainer_hook.plain import stopping; stopping()", "succeeded"),
    ],
    ids=["asks", "saves", "loops", "begins"],
)
def test_a_loop_that_ends_without_a_further_save_has_succeeded_and_who_only_asks_has_not(
    code: str, state: str, tmp_path: Path
) -> None:
    saves = "from trainer_hook.plain import save; save(7, lambda folder: (folder / 'state').write_text('7'))"
    with pod(tmp_path / "first", tmp_path / "store") as (sidecar, found):
        with training([sys.executable, "-c", saves], tmp_path / "first", found) as running:
            assert running.wait() == 0, running.log()
        assert sidecar.terminate() == 0
    with pod(tmp_path / "second", tmp_path / "store") as (_, found):
        with training([sys.executable, "-c", code], tmp_path / "second", found) as running:
            assert running.wait() == 0, running.log()
        assert trainer_state(running.volume)["state"] == state, "a classic sidecar ends after a success, and not before"
        assert trainer_state(running.volume)["step"] == (7 if "latest" in code else 0)
        assert "nothing was saved" not in running.log()


def test_a_file_that_cannot_be_written_leaves_nothing_and_training_goes_on(tmp_path: Path) -> None:
    script = "from trainer_hook.plain import save\nprint(save(3, lambda folder: (folder / 'no' / 'where').touch()))"
    with (
        pod(tmp_path / "volume", tmp_path / "store") as (_, found),
        training([sys.executable, "-c", script], tmp_path / "volume", found) as running,
    ):
        assert running.wait() == 0, running.log()
        assert "checkpoint-3 could not be saved (FileNotFoundError" in running.log()
        assert "False\n" in running.log()
        assert not (running.volume / "checkpoint-3").exists()


HELD = """
import gc, weakref
from trainer_hook.plain import save
class Model: pass
model = Model()
held = weakref.ref(model)
def write(folder, model=model): (folder / "state").write_text(str(model))
assert save(3, write)
del model, write
gc.collect()
print("held:", held() is not None)
"""


def test_what_a_script_saved_is_not_held_after_the_save(tmp_path: Path) -> None:
    with (
        pod(tmp_path / "volume", tmp_path / "store") as (_, found),
        training([sys.executable, "-c", HELD], tmp_path / "volume", found) as running,
    ):
        assert running.wait() == 0, running.log()
        assert "held: False" in running.log()


def test_without_a_volume_a_loop_is_told_so_once() -> None:
    loop = "for step in range(9): assert not stopping() and not save(step, print)"
    script = f"from trainer_hook.plain import save, stopping\n{loop}"
    environ = {name: value for name, value in plain_environ().items() if name != "CKPT_DIR"}
    ended = subprocess.run([sys.executable, "-c", script], env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stderr.count("nothing is saved") == 1


LOOP_OF_TWO = """
import os, sys, time, torch.distributed as dist
from trainer_hook.plain import save, stopping
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} is {os.getpid()}", flush=True)
for step in range(1, 10000):
    time.sleep(0.02)
    if stopping():
        save(step, lambda folder: (folder / f"state{rank}").write_text(str(step)))
        sys.exit(143)
    if step % 5 == 0:
        save(step, lambda folder: (folder / f"state{rank}").write_text(str(step)))
    print(f"rank {rank} step {step}", flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_holds_the_others_no_longer_than_the_grace_period(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP_OF_TWO)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "loop.py")]
    settings = {"CKPT_GRACE_SECONDS": "5", "CKPT_API_PORT": str(free_port()), "CKPT_RESUME": "off"}
    with training(launcher, tmp_path / "volume", settings) as running:
        running.at_step(20)
        pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is (\d+)", running.log())}
        os.kill(pids[1], signal.SIGSTOP)
        began_s = time.monotonic()
        os.kill(pids[0], signal.SIGTERM)
        running.said("WARNING (rank 0): another rank does not answer")
        assert time.monotonic() - began_s > 2
        assert "the newest committed step stands" in running.log()
        os.kill(pids[1], signal.SIGCONT)
        assert running.wait(timeout_s=30) != 0
