"""The acts of the demo, and the judgement at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from examples.demo import stores
from examples.demo.outcome import DIGEST, Outcome, digest_in, judge, show
from examples.demo.pod import Pod
from examples.demo.timeline import Timeline, complain
from sidecar.errors import SidecarError

MAX_STEPS = 60
SAVE_STEPS = 20
PATIENCE_S = 120.0


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
    show(outcome, as_json=as_json)
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
        self._timeline.heading("pod 1: trains, then gets SIGTERM between two saves")
        first, told_s, codes = self._preempted()
        last_step = int(json.loads((first.volume / ".ckpt/trainer.json").read_text())["step"])
        self._timeline.heading("the volume is deleted with the pod; pod 2 starts on an empty one")
        shutil.rmtree(first.volume)
        second, resumed_digest, second_codes = self._resumed()
        return judge(
            first,
            second,
            told_s=told_s,
            last_step=last_step,
            digests=(digest, resumed_digest),
            keys=stores.keys(self._store),
            trainer_exit_codes=(codes[0], second_codes[0]),
            sidecar_exit_codes=(codes[1], second_codes[1]),
        )

    def _command(self, output: str) -> list[str]:
        where = str(self._folder / output)
        return [sys.executable, str(self._script), "--max-steps", str(MAX_STEPS), "--output-dir", where]

    def _uninterrupted(self) -> str:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
        done = subprocess.run(
            self._command("plain"), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        digest = digest_in(done.stdout.splitlines())
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
            digest = digest_in(trainer.lines)
            self._timeline.say("script", f"finished, exit code {code}; {DIGEST}{digest[:16]}…")
            return pod, digest, (code, pod.end_sidecar(timeout_s=PATIENCE_S))
        finally:
            pod.kill()
