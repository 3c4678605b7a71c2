"""The acts of the demo, and the judgement at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sidecar.demo import stores
from sidecar.demo.pod import Pod, at_s
from sidecar.demo.timeline import Timeline, complain
from sidecar.errors import SidecarError
from sidecar.screens import table

MAX_STEPS = 60
SAVE_STEPS = 20
PATIENCE_S = 120.0
PREEMPTED = 143
DIGEST = "weights sha256 "


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo shows. Seconds are wall time."""

    ok: bool
    steps_lost: int
    bit_identical: bool
    jit_step: int
    resumed_step: int
    save_s: float
    """SIGTERM until the trainer had finished its just-in-time checkpoint."""
    sigterm_to_durable_s: float
    resume_s: float
    """The new pod's sidecar being asked, until the checkpoint was verified on the volume."""
    objects: int
    final_durable: bool
    trainer_exit_codes: tuple[int, int]
    sidecar_exit_codes: tuple[int, int]


def run(*, kind: str, script: Path, folder: Path, as_json: bool) -> int:
    """Run all acts. Returns the exit code: 0 only if nothing was lost and the weights are bit-identical."""
    if not script.is_file():
        complain(f"{script} is not there: run it in the repository, or name the script with --script")
        return 2
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    timeline = Timeline()
    try:
        with stores.store(kind, folder) as settings:
            outcome = _Acts(timeline, folder, script, settings).play()
    except (TimeoutError, subprocess.TimeoutExpired, SidecarError, OSError, ValueError) as error:
        complain(f"{error}; what was written is in {folder}")
        return 1
    print(f"\n{_table(outcome)}\n")  # noqa: T201
    print("ok" if outcome.ok else "NOT OK", flush=True)  # noqa: T201
    if as_json:
        print(json.dumps(asdict(outcome)), flush=True)  # noqa: T201
    return 0 if outcome.ok else 1


class _Acts:
    def __init__(self, timeline: Timeline, folder: Path, script: Path, settings: dict[str, str]) -> None:
        self._timeline = timeline
        self._folder = folder
        self._script = script
        self._store = settings
        self._settings = settings | {
            "CKPT_SAVE_STRATEGY": "steps",
            "CKPT_SAVE_STEPS": str(SAVE_STEPS),
            "CKPT_GRACE_SECONDS": "60",
        }

    def play(self) -> Outcome:
        self._timeline.heading("the same script, never interrupted, without this project")
        digest = self._uninterrupted()
        self._timeline.heading("pod 1: trains, then is told to go in the middle of a save interval")
        first, told_s, codes = self._preempted()
        saved = first.find("checkpoint_finished", save_reason="jit")
        if saved is None:
            raise ValueError("the trainer left no just-in-time checkpoint; its output is above")
        jit_step = int(saved["step"])
        durable = first.wait_for("checkpoint_committed", timeout_s=0, step=jit_step)
        last_step = int(json.loads((first.volume / ".ckpt/trainer.json").read_text())["step"])
        self._timeline.heading("the volume is deleted with the pod; pod 2 starts on an empty one")
        shutil.rmtree(first.volume)
        second, resumed_digest, second_codes = self._resumed()
        resumed = second.wait_for("resume_ready", timeout_s=0)
        keys = stores.keys(self._store)
        steps_lost, final = last_step - int(resumed["step"]), "final/.complete" in keys
        exits = (codes[0], second_codes[0]), (codes[1], second_codes[1])
        return Outcome(
            ok=steps_lost == 0 and digest == resumed_digest and final and exits == ((PREEMPTED, 0), (0, 0)),
            steps_lost=steps_lost,
            bit_identical=digest == resumed_digest,
            jit_step=jit_step,
            resumed_step=int(resumed["step"]),
            save_s=round(at_s(saved) - told_s, 3),
            sigterm_to_durable_s=round(at_s(durable) - told_s, 3),
            resume_s=float(resumed["took_s"]),
            objects=len(keys),
            final_durable=final,
            trainer_exit_codes=exits[0],
            sidecar_exit_codes=exits[1],
        )

    def _command(self, output: str) -> list[str]:
        where = str(self._folder / output)
        return [sys.executable, str(self._script), "--max-steps", str(MAX_STEPS), "--output-dir", where]

    def _uninterrupted(self) -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
        done = subprocess.run(
            self._command("plain"), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        digest = _digest(done.stdout.splitlines())
        self._timeline.say("script", f"{MAX_STEPS} steps; {DIGEST}{digest[:16]}…")
        return digest

    def _preempted(self) -> tuple[Pod, float, tuple[int, int]]:
        pod = Pod(self._timeline, self._folder / "pod-1", self._settings)
        try:
            trainer = pod.train(self._command("pod-1-output"))
            pod.wait_for("checkpoint_committed", timeout_s=PATIENCE_S, step=SAVE_STEPS)
            told_s = time.time()
            self._timeline.say("kubelet", "SIGTERM to the trainer")
            trainer.signal(signal.SIGTERM)
            code = trainer.wait(PATIENCE_S)
            self._timeline.say("kubelet", f"the trainer exited {code}; SIGTERM to the sidecar")
            return pod, told_s, (code, pod.end_sidecar(timeout_s=PATIENCE_S))
        finally:
            pod.kill()

    def _resumed(self) -> tuple[Pod, str, tuple[int, int]]:
        pod = Pod(self._timeline, self._folder / "pod-2", self._settings)
        try:
            trainer = pod.train(self._command("pod-2-output"))
            code = trainer.wait(PATIENCE_S)
            digest = _digest(trainer.lines)
            self._timeline.say("script", f"finished, exit code {code}; {DIGEST}{digest[:16]}…")
            return pod, digest, (code, pod.end_sidecar(timeout_s=PATIENCE_S))
        finally:
            pod.kill()


def _digest(lines: list[str]) -> str:
    for line in reversed(lines):
        if line.startswith(DIGEST):
            return line.removeprefix(DIGEST).strip()
    tail = "\n".join(lines[-15:])
    raise ValueError(f"the training script did not print '{DIGEST}…'; it ended with:\n{tail}\n")


def _table(outcome: Outcome) -> str:
    rows = [
        ["steps lost", str(outcome.steps_lost)],
        ["just-in-time checkpoint at step", str(outcome.jit_step)],
        ["resumed at step", str(outcome.resumed_step)],
        ["SIGTERM until saved", f"{outcome.save_s:.2f} s"],
        ["SIGTERM until durable", f"{outcome.sigterm_to_durable_s:.2f} s"],
        ["resume (choose, download, verify)", f"{outcome.resume_s:.2f} s"],
        ["final/ durable", "yes" if outcome.final_durable else "NO"],
        ["objects in the store", str(outcome.objects)],
        ["exit codes of the trainers, of the sidecars", f"{outcome.trainer_exit_codes}, {outcome.sidecar_exit_codes}"],
        ["final weights bit-identical to the uninterrupted run", "yes" if outcome.bit_identical else "NO"],
    ]
    return table(["WHAT", "MEASURED"], rows)
