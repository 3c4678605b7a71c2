"""Process-wide state of the hook: settings, lease, signals, consensus with the other ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_hook.contract import TRAINER_STATE, TrainerState, encode_trainer_state, rfc3339, step_of
from trainer_hook.process import earlier_scripts, exit_code
from trainer_hook.process.client import Client
from trainer_hook.process.durable_wait import end_after_failure, wait_until_durable
from trainer_hook.process.earlier_scripts import Ended
from trainer_hook.process.log import info, warn
from trainer_hook.process.rank_consensus import RankConsensus, World, new_attempt
from trainer_hook.process.save_requests import SaveRequests
from trainer_hook.process.settings import Settings, from_environment, ignored_setting
from trainer_hook.process.signals import StopSignal, exit_now
from trainer_hook.process.training_progress import TrainingProgress
from trainer_hook.volume import lease
from trainer_hook.volume.publish import is_there, make_system_folders, publish, publish_awaited
from trainer_hook.volume.retry import retried


@dataclass(slots=True)
class Session:
    """Opened when the training library is imported; ``join`` completes it at the first ``train()``."""

    settings: Settings
    stop: StopSignal
    requests: SaveRequests
    client: Client
    consensus: RankConsensus | None = None
    world: World | None = None
    """This process among all; ``None`` before it has its lease."""
    attempt: str = ""
    outcome: str | None = None
    """``succeeded`` (the last ``train()`` ended by itself) or ``preempted``; ``None``: still training."""
    train_calls: int = 0
    """Calls of ``train()`` that have ended, of this script and of those that trained before it in this container."""
    base_step: int = 0
    """Steps of the earlier ``train()`` calls: the numbers of checkpoints continue through all calls."""
    earlier: Ended | None = None
    """The script that trained before this one; ``None``: not looked up yet."""
    origin: dict[str, Any] | None = None
    """Step and attempt of the checkpoint that this attempt resumed from; ``None``: none, or unknown."""
    call_runs: bool = False
    """A ``train()`` call trains: one inside it, such as of a callback, is a part of its step."""
    last_step: int = 0
    measure: Callable[[], TrainingProgress] | None = None
    """Returns the progress of the running ``train()`` call; ``None``: none is running."""
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    """As measured last."""
    saved: set[str] = field(default_factory=set)
    """Names that this process saved, or resumed from: not saved again, unless the last save failed. The same on every rank."""
    not_saved: dict[str, None] = field(default_factory=dict)
    """Names whose last save by this process failed, in the order of the failures."""
    save_error: str | None = None
    """Why the latest save failed; ``None``: it succeeded, or none was tried."""
    saves: Counter[str] = field(default_factory=Counter)
    """Number of saves of each name in this attempt, the same on every rank: the marker's ``save_id``."""
    pid: int = field(default_factory=os.getpid)
    listens: bool = False
    left_in_thread: bool = False
    """Training was preempted in a thread, which the exit of the main thread does not show."""

    def listen(self) -> None:
        """Handle signals from now on: outside training SIGTERM ends this process as preempted."""
        if self.settings.jit and not self.listens and os.getpid() == self.pid:
            self.listens = True
            self.stop.install()

    def join(self) -> RankConsensus:
        """Take this rank's lease and agree on the attempt. Collective at the first time; later calls return at once."""
        if self.consensus is None:
            consensus = RankConsensus(timeout_s=self.settings.resume_timeout_s + 60)
            self.take_part(consensus.world, consensus.from_rank_0(self.attempt or new_attempt()))
            self.consensus = consensus
        return self.consensus

    def join_again(self) -> RankConsensus:
        """As ``join``, where a ``train()`` call begins: with the process group that the script has now. Collective."""
        consensus = self.join()
        if consensus.rejoin():
            self.take_part(consensus.world, consensus.from_rank_0(self.attempt))
        return consensus

    def count_on_from(self, earlier: Ended) -> None:
        """Count on from the scripts that trained before this one. The same on every rank."""
        self.earlier, self.train_calls, self.base_step = earlier, earlier.calls, earlier.steps
        if earlier.calls:
            self.origin = {"step": earlier.steps, "attempt": earlier.attempt}
            if self.world is not None and self.world.local_rank == 0:
                info(f"{earlier.script} trained before in this container: this script has checkpoints of its own")

    @property
    def is_first_call(self) -> bool:
        """Whether this script has not ended a ``train()`` call yet."""
        return self.train_calls == (self.earlier.calls if self.earlier else 0)

    def is_inner_call(self) -> bool:
        """Whether a call of ``train()`` that begins now is inside another one: it is neither saved nor resumed by itself."""
        if self.call_runs:
            _say_that_inner_calls_are_left_alone()
        return self.call_runs

    def call_ended(self, step: int) -> None:
        """Count a ``train()`` call that has ended by itself after ``step`` steps."""
        self.base_step += step
        self.train_calls += 1
        self.outcome = "succeeded"
        if self.world is not None and self.world.local_rank == 0:
            earlier_scripts.record(self.settings.dir, calls=self.train_calls, steps=self.base_step, attempt=self.attempt)

    def take_part(self, world: World, attempt: str) -> None:
        """Take this rank's lease for an attempt."""
        try:
            is_new = self.world is None or self.world.rank != world.rank
            if is_new and not retried(functools.partial(lease.hold, self.settings.dir, world.rank)):
                warn(f"another process holds the lease of rank {world.rank} in {self.settings.dir}: one job per volume")
        except OSError as error:
            warn(f"no lease ({error}): the sidecar cannot see that rank {world.rank} is alive")
        self.world, self.attempt = world, attempt

    def continues_from(self, name: str, *, attempt: str | None) -> None:
        """Record the checkpoint that training resumes from, for later markers: other saves beyond its step were abandoned."""
        self.saved.add(name)
        origin = {"step": step_of(name), "attempt": attempt}
        self.origin = {key: value for key, value in origin.items() if value is not None}

    def tell_saves(self, error: str | None) -> None:
        """Record that the latest save failed, or (``None``) succeeded; tell the sidecar at once when that changes."""
        is_news = (error is None) is not (self.save_error is None)
        self.save_error = error
        if is_news:
            self._write_state("running", self.last_step, publish_awaited)

    def tell_state(self, state: str, step: int) -> None:
        """Write ``trainer.json``, once per node. Errors are ignored; only ``running`` is told again.

        A classic sidecar ends its pod by ``succeeded``.
        """
        self.last_step = step
        self._write_state(state, step, publish if state == "running" else publish_awaited)

    def _write_state(self, state: str, step: int, write: Callable[[Path, bytes], None]) -> None:
        if self.world is None or self.world.local_rank != 0:
            return
        if self.measure is not None:
            with contextlib.suppress(Exception):  # a detail for people: no reason to disturb training
                self.progress = self.measure()
        content = TrainerState(
            state,
            self.attempt,
            step,
            self.world.size,
            os.getpid(),
            rfc3339(time.time()),
            total_steps=self.progress.total_steps,
            loss=self.progress.loss,
            save_error=self.save_error,
        )
        with contextlib.suppress(OSError):
            write(self.settings.dir / TRAINER_STATE, encode_trainer_state(content))

    def at_exit(self) -> None:
        """Run at exit: after success, wait until all checkpoints are durable, because the pod ends with this process."""
        if os.getpid() == self.pid:
            self._end_preempted()
        if os.getpid() != self.pid or self.world is None or (state := self._end_state()) is None:
            return
        self.tell_state(state, self.last_step)
        if state != "succeeded":
            return
        if self.world.local_rank == 0:
            self.listen()
            with self.stop.training():  # a signal ends the wait, not the interpreter in the middle of its exit
                missing = wait_until_durable(self.client, self.stop, self.not_saved)
            if missing and self.settings.fail_without_store:
                end_after_failure(missing)

    def _end_state(self) -> str | None:
        """Return the state to tell at exit; ``None``: the one that was told last stands."""
        # After a preemption it is an error on the way out of the training that was saved.
        if self.outcome != "preempted" and exit_code.is_uncaught():
            return "failed"
        if self.outcome != "succeeded":
            return None
        if self.stop.notice_at_s is not None:  # in the code of the script after training
            return "preempted"
        return "failed" if exit_code.failed() else "succeeded"

    def _end_preempted(self) -> None:
        """End with the exit code of a preemption, also where the script ends in another way: its training is not over."""
        code = self.settings.preempted_exit_code
        if self.left_in_thread:
            exit_now(code)
        if self.outcome == "preempted" and not exit_code.is_known_to_be(code):
            info(f"exits {code}: the script did not end with the SystemExit of the preemption, and its training is not over")
            exit_now(code)


_current: Session | None = None


def current_session() -> Session:
    """Return the session of this process, opened at the first call. A forked child of a process that trains gets its parent's.

    Raises:
        SettingError: A variable is invalid.
        FileNotFoundError: The volume is not mounted.
    """
    global _current
    if _current is None:
        _current = open_session(from_environment(os.environ))
    elif _current.pid != os.getpid() and _current.world is None:  # the parent has only imported the library
        _current = _open_forked()
    _current.listen()
    return _current


def known_session() -> Session | None:
    """Return the session that this process itself has opened; ``None``: it has not."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def session_of_saves() -> Session | None:
    """Return this process's session for saves by the script; SIGTERM stays with the script.

    ``None``: there is no volume, or this is a forked child of a process with a session.

    Raises:
        SettingError: A variable is invalid.
    """
    global _current
    if _current is None and is_there((settings := from_environment(os.environ)).dir):
        _current = open_session(settings)
    return known_session()


def session_from_environment() -> Session | None:
    """Return this process's session; ``None``: there is no volume, and nothing is saved.

    Raises:
        SettingError: A ``CKPT_*`` variable is unknown or invalid.
        FileNotFoundError: ``CKPT_DIR`` names a folder that does not exist.
    """
    global _current
    settings = from_environment(os.environ)
    if is_there(settings.dir):
        if _current is None or _current.pid != os.getpid():  # forked: a process of its own that trains
            _current = open_session(settings)
        _current.listen()
        return _current
    if os.environ.get("CKPT_DIR", "").strip():
        raise FileNotFoundError(f"CKPT_DIR={settings.dir} is not a directory: mount the shared volume there")
    _say_that_nothing_is_saved(settings.dir)
    return None


@functools.cache  # scripts ask at each step
def _say_that_nothing_is_saved(folder: Path) -> None:
    info(f"CKPT_DIR is not set and {folder} does not exist: nothing is saved, nothing resumed")


@functools.cache
def _say_that_inner_calls_are_left_alone() -> None:
    info("a training inside another one is left alone: it is neither saved nor resumed by itself")


def open_session(settings: Settings) -> Session:
    """Open a session, and register what runs at exit.

    Raises ``FileNotFoundError``: the volume is not mounted.
    """
    try:
        make_system_folders(settings.dir)
    except FileNotFoundError:
        raise
    except OSError as error:  # it may pass; a rank that trains without the hook leaves all others waiting
        warn(f"{settings.dir} cannot be written to now ({error}): training goes on, and each save tries again")
    if (said := ignored_setting(os.environ)) is not None:
        info(said)
    stop = StopSignal(settings.dir, exit_code=settings.preempted_exit_code, grace_s=settings.grace_seconds)
    session = Session(settings, stop, SaveRequests(settings.dir), Client(settings.sidecar_url, settings.dir))
    # Registered early, so that it runs after the script's own functions.
    atexit.register(session.at_exit)
    stop.before_exit = session.at_exit
    exit_code.watch()
    return session


def _open_forked() -> Session:
    from multiprocessing import util

    session = open_session(from_environment(os.environ))

    def end() -> None:
        if session.outcome == "succeeded":  # a preemption has its exit code already
            session.at_exit()

    util.Finalize(None, end, exitpriority=-1)  # a forked child of multiprocessing ends without atexit
    return session
