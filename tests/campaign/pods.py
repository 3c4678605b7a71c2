"""A pod: a volume, one sidecar after the other, and a trainer."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.campaign.published import Version
from tests.campaign.run import Run, ends, patience
from tests.campaign.trainer import Trainer
from tests.process.sidecar_process import Sidecar, until

EXIT_OK, EXIT_GIVEN_UP, EXIT_FENCED = 0, 3, 4
SLACK_S = 12.0
"""What the end of a process may take beyond its grace period on a machine that is busy."""
STARTING_S = 2.0
"""Seconds that a sidecar may take from its start until it has scanned the volume and pinned each checkpoint on it."""


class Pod:
    """One pod of a run."""

    def __init__(self, run: Run, uid: str, volume: Path, settings: Mapping[str, str] | None = None) -> None:
        self.run, self.uid, self.volume = run, uid, volume
        self._settings = run.settings | {"POD_UID": uid, "POD_NAMESPACE": "team", "JOB_NAME": "train"} | dict(settings or {})
        self._lives = 0
        self._sidecar: Sidecar | None = None
        self.trainer: Trainer | None = None
        self._torn: set[str] = set()
        self._started_s = 0.0
        self.is_ending = False
        """Somebody ends the sidecar, so it may end."""

    @property
    def grace_s(self) -> float:
        return float(self._settings["CKPT_GRACE_SECONDS"])

    @property
    def sidecar(self) -> Sidecar:
        assert self._sidecar is not None
        return self._sidecar

    @property
    def lives(self) -> bool:
        return self._sidecar is not None and self._sidecar.process.poll() is None

    def start(self, within: Sequence[str] = ()) -> None:
        """Start another sidecar on the volume."""
        self._lives += 1
        self.is_ending = False
        log = self.run.folder / f"{self.uid}-{self._lives}.log"
        self._started_s = time.monotonic()
        self._sidecar = Sidecar(self.volume, self._settings, log, within=within)
        self.run.figures["sidecars"] += 1
        self.run.note(f"{self.uid}: sidecar {self._lives} starts, pid {self._sidecar.process.pid}")

    def train(self) -> Trainer:
        """Start a training process."""
        self._torn = self.torn
        rotates = self.run.story.rotates
        seed = f"{self.run.story.seed} {self._lives} {time.monotonic_ns()}"
        self.trainer = Trainer(
            self.volume, self.run.published, seed, sidecar=lambda: self.sidecar, pod=self.uid, rotates=rotates
        )
        check = ResumeCheck(self)
        self.trainer.before_resume, self.trainer.on_resume = check.before, check.after
        self.trainer.start()
        return self.trainer

    def stop_training(self) -> None:
        if self.trainer is not None:
            self.trainer.stop()
            if self.trainer.is_alive():
                self.run.violation(f"{self.uid}: the trainer hangs")
            if self.trainer.error is not None:
                raise self.trainer.error
            self.run.figures["saves that failed for the volume"] += self.trainer.failed_saves

    @property
    def torn(self) -> set[str]:
        """What the trainers of this volume began to write over."""
        return self._torn | (self.trainer.torn if self.trainer else set())

    @property
    def _rotated_unheld(self) -> set[str]:
        """What the trainer rotated away while no sidecar could hold it."""
        starting_until_s = self._started_s + patience(STARTING_S)
        rotated_s = self.trainer.rotated_s if self.trainer else {}
        return {name for name, at_s in rotated_s.items() if at_s < starting_until_s}

    def gave_up_what_the_trainer_took(self) -> bool:
        """Whether the exit report names nothing but checkpoints that a trainer spoiled or took from a sidecar."""
        report = self.sidecar.report
        named = {entry["checkpoint"] for entry in report["given_up"]} | set(report["newest_rejected"])
        return bool(named) and named <= self.torn | self._rotated_unheld and not report["unseen"]

    @property
    def newest(self) -> Version | None:
        return None if self.trainer is None else self.trainer.newest

    def _rotated_unseen(self, version: Version) -> bool:
        """Whether the trainer rotated a checkpoint away before a sidecar that was still starting looked at the volume."""
        seen = {event["checkpoint"] for event in self.sidecar.events("checkpoint_finished")}
        return version.name not in seen and not (self.volume / version.name).exists()

    def kill(self) -> None:
        self.is_ending = True
        self.sidecar.kill()
        self.run.note(f"{self.uid}: kill -9")

    def stop(self, length_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.run.note(f"{self.uid}: stopped for {length_s:.1f} s")
        self.sidecar.process.send_signal(signal.SIGSTOP)
        time.sleep(length_s)
        self.sidecar.process.send_signal(signal.SIGCONT)

    def terminate(self, *, with_trainer: bool = False) -> int | None:
        """Send SIGTERM and check the end: in time, and 0 only if the newest is in the store."""
        self.is_ending = True
        if not self.lives:
            return self.sidecar.process.poll()
        # A container's first process has no default handlers: a signal that comes before ours does not end it.
        with contextlib.suppress(AssertionError):
            until(self.sidecar.log, timeout_s=patience(10.0))
        began_s, newest = time.monotonic(), self.newest
        self.sidecar.process.send_signal(signal.SIGTERM)
        code = ends(self.sidecar, within_s=self.grace_s + SLACK_S)
        self.run.note(f"{self.uid}: SIGTERM, exit code {code} after {time.monotonic() - began_s:.1f} s")
        if code is None:
            self.run.violation(
                f"{self.uid}: still runs {patience(self.grace_s + SLACK_S):.0f} s after SIGTERM, of {self.grace_s} s grace"
            )
            self.sidecar.kill()
        elif code not in (EXIT_OK, EXIT_GIVEN_UP, EXIT_FENCED):
            self.run.violation(f"{self.uid}: exit code {code} after SIGTERM: {self.sidecar.log()[-1500:]}")
        elif code == EXIT_OK:
            if with_trainer and self.trainer is not None and self.trainer.newest_s < time.monotonic() - patience(2.0):
                newest = self.newest  # else it may have been finished after the sidecar's last look
            if newest is not None and not self.run.is_committed_or_newer(newest, or_later=self._rotated_unseen(newest)):
                self.run.violation(f"{self.uid}: exit code 0, and {newest.name} is not in the store")
        return code

    def answers(self, path: str) -> Any:
        """Return an answer of the local API; ``None``: there is none."""
        try:
            return self.sidecar.call("GET", path, timeout_s=5.0)
        except (OSError, ValueError, HTTPException):
            return None

    def until_up(self, *, within_s: float) -> None:
        """Wait until the API answers, or the time is over."""
        began_s = time.monotonic()
        while self.lives and self.answers("/healthz") is None and time.monotonic() - began_s < patience(within_s):
            time.sleep(0.1)

    def holds_prefix(self, *, within_s: float) -> bool:
        """Wait until it is the pod whose claim counts."""
        began_s = time.monotonic()
        while self.lives and time.monotonic() - began_s < patience(within_s):
            if ((self.answers("/v1/status") or {}).get("lease") or {}).get("state") == "held":
                return True
            time.sleep(0.1)
        return False

    def flushed(self, *, within_s: float) -> bool:
        """Wait until everything that is finished is durable, by its own account."""
        try:
            limit_s = patience(within_s)
            asked = self.sidecar.call("POST", "/v1/flush", {"timeout_s": limit_s}, timeout_s=limit_s + 10)
        except (OSError, ValueError, HTTPException):
            return False
        return bool(asked["http_status"] == 200)

    def check_alive(self) -> None:
        """A sidecar ends only when it is told to."""
        if self._sidecar is not None and not self.lives and not self.is_ending:
            self.run.violation(f"{self.uid}: ended by itself with {self.sidecar.process.poll()}: {self.sidecar.log()[-1500:]}")

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer._stopping.set()
        if self._sidecar is not None and self.lives:
            self.sidecar.process.send_signal(signal.SIGCONT)
            self.sidecar.close()


class ResumeCheck:
    """What a trainer gets at its start, beside what the store has before and after."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._before: str | None = None

    def before(self) -> None:
        self._before = self._pod.run.newest()

    def after(self, answer: dict[str, Any]) -> None:
        run, uid = self._pod.run, self._pod.uid
        run.note(f"{uid}: the resume answers {answer['state']} {answer.get('checkpoint')} ({answer.get('source')})")
        if answer["state"] == "ready":
            run.check_resumed(answer, self._pod.volume, of=None)
        after = run.newest()
        if answer["state"] == "none" and self._before is not None and self._before == after:
            run.violation(f"{uid}: a resume answered none, and {after} is committed")
        older = answer["state"] == "ready" and answer.get("source") == "store" and self._before == after != answer["checkpoint"]
        passed_over = [entry["checkpoint"] for entry in answer.get("passed_over") or []]
        if older and after not in passed_over:
            run.violation(f"{uid}: a resume gave {answer['checkpoint']}, and {after} is committed, and not passed over")
