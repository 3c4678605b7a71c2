"""What a training process holds for its whole life: settings, lease, signals, and the agreement with the other ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from trainer_hook.contract import TRAINER_STATE, TrainerState, encode_trainer_state, rfc3339, step_of
from trainer_hook.process import exit_code
from trainer_hook.process.client import Client
from trainer_hook.process.ending import end_after_failure, wait_until_durable
from trainer_hook.process.log import info, warn
from trainer_hook.process.rank_consensus import RankConsensus, World, new_attempt
from trainer_hook.process.settings import Settings, from_environment
from trainer_hook.process.signals import SaveRequests, StopSignal, exit_now
from trainer_hook.volume import lease
from trainer_hook.volume.publish import make_system_folders, publish


@dataclass(slots=True)
class Session:
    """Made when the trainer's library is imported; ``join`` completes it once the ranks know each other."""

    settings: Settings
    stop: StopSignal
    requests: SaveRequests
    client: Client
    consensus: RankConsensus | None = None
    world: World | None = None
    """This process among all, once it has its lease."""
    attempt: str = ""
    outcome: str | None = None
    """``succeeded`` after a ``train()`` that ended by itself; ``failed``, ``preempted``."""
    train_calls: int = 0
    base_step: int = 0
    """Steps of the ``train()`` calls before this one: checkpoints are numbered on through all of them."""
    origin: dict[str, Any] | None = None
    """Step and attempt of the checkpoint that this attempt continues from; ``None``: it is not known, or there is none."""
    last_step: int = 0
    saved: set[str] = field(default_factory=set)
    """Names that this process tried to write, or loaded: never written again. The same on every rank."""
    saves: Counter[str] = field(default_factory=Counter)
    """How often each name was written in this attempt: the same on every rank, so it names the writing (``save_id``)."""
    pid: int = field(default_factory=os.getpid)
    listens: bool = False
    left_in_thread: bool = False
    """Training was preempted in another thread than the main one, whose end does not know of it."""

    def listen(self) -> None:
        """Hear signals from now on: outside training SIGTERM then ends this process as preempted."""
        if self.settings.jit and not self.listens and os.getpid() == self.pid:
            self.listens = True
            self.stop.install()

    def join(self) -> RankConsensus:
        """Take this rank's lease and agree on the attempt. Collective: every rank calls it at its first ``train()``."""
        if self.consensus is None:
            consensus = RankConsensus(timeout_s=self.settings.resume_timeout_s + 60)
            self.take_part(consensus.world, consensus.from_rank_0(self.attempt or new_attempt()))
            self.consensus = consensus
        return self.consensus

    def take_part(self, world: World, attempt: str) -> None:
        """Take this rank's lease, as one of an attempt."""
        if self.world is None:
            self._take_lease(world.rank)
        self.world, self.attempt = world, attempt

    def _take_lease(self, rank: int) -> None:
        try:
            if not lease.hold(self.settings.dir, rank):
                warn(f"another process holds the lease of rank {rank} in {self.settings.dir}: one job per volume")
        except OSError as error:
            warn(f"no lease ({error}): the sidecar cannot see that rank {rank} is alive")

    def continues_from(self, name: str, *, attempt: str | None) -> None:
        """A checkpoint was chosen to go on from; what is saved says so: steps beyond it are of a line that was left."""
        self.saved.add(name)
        told = {"step": step_of(name), "attempt": attempt}
        self.origin = {key: value for key, value in told.items() if value is not None}

    def tell_state(self, state: str, step: int) -> None:
        """Write ``trainer.json``, once per node. A full disk does not matter here."""
        self.last_step = step
        if self.world is None or self.world.local_rank != 0:
            return
        told = TrainerState(state, self.attempt, step, self.world.size, os.getpid(), rfc3339(time.time()))
        with contextlib.suppress(OSError):
            publish(self.settings.dir / TRAINER_STATE, encode_trainer_state(told))

    def at_exit(self) -> None:
        """The last act after success: stay until what was saved is durable, because the pod ends with this process."""
        if self.left_in_thread and os.getpid() == self.pid:
            exit_now(self.settings.preempted_exit_code)
        if os.getpid() != self.pid or self.world is None or self.outcome != "succeeded":
            return
        if self.stop.notice_at_s is not None:  # the script's own last part was cut short: it is run again
            self.tell_state("preempted", self.last_step)
            return
        if exit_code.failed():  # the container is restarted: this is not the job's success
            self.tell_state("failed", self.last_step)
            return
        self.tell_state("succeeded", self.last_step)
        if self.world.local_rank == 0:
            self.listen()
            with self.stop.training():  # a signal ends the wait, not the interpreter in the middle of its exit
                missing = wait_until_durable(self.client, self.stop)
            if missing and self.settings.fail_without_store:
                end_after_failure(missing)


_current: Session | None = None


def current_session() -> Session:
    """Return the one session of this process, opened when it is first asked for. A forked child is given its parent's.

    Raises:
        SettingError: A variable is not valid.
        OSError: The volume is not there.
    """
    global _current
    if _current is None:
        _current = open_session(from_environment(os.environ))
    _current.listen()
    return _current


def known_session() -> Session | None:
    """Return this process's session if there is one."""
    return _current if _current is not None and _current.pid == os.getpid() else None


def session_of_saves() -> Session | None:
    """Return this process's session for what its script saves by itself; SIGTERM stays the script's business.

    ``None`` where there is no volume, and in a forked child of a process that has a session.

    Raises:
        SettingError: A variable is not valid.
        OSError: The volume is not writable.
    """
    global _current
    if _current is None and (settings := from_environment(os.environ)).dir.is_dir():
        _current = open_session(settings)
    return known_session()


def session_from_environment() -> Session | None:
    """Return this process's session, or ``None`` where there is no volume: the loop then runs as it would without us.

    Raises:
        SettingError: A ``CKPT_*`` variable is not known or not valid.
        FileNotFoundError: ``CKPT_DIR`` names a folder that does not exist.
    """
    global _current
    settings = from_environment(os.environ)
    if settings.dir.is_dir():
        if _current is None or _current.pid != os.getpid():  # forked: a process of its own that trains
            _current = open_session(settings)
        _current.listen()
        return _current
    if os.environ.get("CKPT_DIR", "").strip():
        raise FileNotFoundError(f"CKPT_DIR={settings.dir} is not a directory: mount the shared volume there")
    info(f"CKPT_DIR is not set and {settings.dir} does not exist: nothing is saved, nothing resumed")
    return None


def open_session(settings: Settings) -> Session:
    """Arrange the last act. Who trains also has it listen for signals, in the main thread, as early as possible."""
    make_system_folders(settings.dir)
    stop = StopSignal(settings.dir, exit_code=settings.preempted_exit_code)
    session = Session(settings, stop, SaveRequests(settings.dir), Client(settings.sidecar_url, settings.dir))
    # Registered early, so that it runs after whatever the script registers.
    atexit.register(session.at_exit)
    _watch_for_failure(session)
    exit_code.watch()
    return session


def _watch_for_failure(session: Session) -> None:
    before = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        session.outcome = "failed"
        session.tell_state("failed", session.last_step)
        before(kind, error, trace)

    sys.excepthook = on_exception
