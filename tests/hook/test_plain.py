"""A script with files of its own, without any library: path, marker and signal."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hook.conftest import pod
from tests.hook.job import finished, marker, trainer_state, training

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
        assert first.terminate() == 143, first.log()
        last = first.steps()[-1]
        assert finished(first.volume) == ["checkpoint-5", f"checkpoint-{last}"]
        assert marker(first.volume, f"checkpoint-{last}")["reason"] == "jit"
        assert trainer_state(first.volume)["state"] == "preempted"
        sidecar.committed(f"checkpoint-{last}")
    with pod(tmp_path / "second", store) as (_, found), training([*command, "0"], tmp_path / "second", found) as second:
        assert second.wait() == 0, second.log()
        assert second.steps() == list(range(last + 1, 21))
        assert "everything is durable" in second.log()
        assert trainer_state(second.volume)["state"] == "succeeded"


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
