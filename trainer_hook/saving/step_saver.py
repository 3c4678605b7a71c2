"""How a step is saved, whoever writes its files."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.background import Background, Captured, fits
from trainer_hook.contract import (
    FINAL,
    LEASES,
    META_OWNER,
    META_RESUMED_FROM,
    META_TRAIN_CALL,
    SCRIPT_OWNED,
    SYSTEM_DIR,
    ContractError,
    Marker,
    Node,
    checkpoint_name,
    rfc3339,
    step_of,
)
from trainer_hook.process.log import say, warn
from trainer_hook.process.session import Session
from trainer_hook.resuming.resumer import META_STOPPED_EARLY
from trainer_hook.saving.disk_admission import SPARE, Room
from trainer_hook.saving.schedule import surplus
from trainer_hook.volume.publish import RankRecords, finish, finished_on, listed_files, remove

STAGING = f"{SYSTEM_DIR}/saving"
"""Where a later ``train()`` call saves before its directory gets the name that counts the earlier calls' steps."""
LONG_WAIT_S = 0.5
POLL_S = 0.2
BEFORE_THE_END_S = 4.0
"""How long before the end of the grace period a save that does not end is given up: this process still has to end in order."""
META_UNFINISHED = "unfinished"
"""Key in ``meta``: a list of what was still to be done of the step."""


class StepSaver:
    """Saves steps of one ``train()`` call. Every method is called on every rank at the same step.

    Who writes the files says how: ``_write``, ``_write_final``, and what is known beforehand.
    """

    def __init__(self, session: Session, background: Background | None = None) -> None:
        """With ``background`` periodic saves are written beside training."""
        agreement = session.join()
        self._session = session
        self._agreement = agreement
        self._volume = session.settings.dir
        world = agreement.world
        self._world = world
        self._records = RankRecords(self._volume, attempt=session.attempt, rank=world.rank, local_ranks=world.local_size)
        with contextlib.suppress(OSError):
            (self._volume / LEASES).mkdir(parents=True, exist_ok=True)
        self._last_bytes = 0
        self._room = Room(self._volume, session.client)
        self._background = background
        self._tried: str | None = None
        self._in_flight = self._lost = self._waited = False
        self._save_s = 0.0
        self.step_seconds: float | None = None
        self.unfinished: tuple[str, ...] = ()
        """What a just-in-time save leaves undone of its step."""

    def name(self, global_step: int) -> str:
        """Return the name of a step of this call: steps count on through all ``train()`` calls of the script."""
        return checkpoint_name(self._session.base_step + global_step)

    def save(self, model: Any, global_step: int, reason: str, *, stopped_early: bool = False) -> bool:
        """Save everything that a resume needs. Returns whether this rank's part was written, now or before.

        Whatever goes wrong is said and left behind: training is never stopped by a save. A step is tried once, and all
        ranks try it or none, so that they stay in step with each other.
        """
        name, urgent = self.name(global_step), reason == "jit"
        known = name in self._session.saved
        if known and not urgent:
            return True
        self.settle()
        if known and not self._was_lost(name):
            return True
        self._session.saved.add(name)
        self._session.saves[name] += 1
        began_s = time.monotonic()
        if not self._agreement.all_agree(self._prepare(name, urgent=urgent)):
            return False
        wrote, captured, self._tried, self._lost = True, None, name, False
        try:
            captured = self._begin(model, global_step, beside=reason == "periodic")
        except Exception as error:
            self._failed(name, error)
            wrote = False
        if self._staged and self._agreement.all_agree(wrote) and self._world.local_rank == 0:
            wrote = self._leave_staging(global_step, name)
        if captured is not None and wrote:
            self._finish_later(captured, name, reason, began_s, stopped_early=stopped_early)
            return True
        if captured is not None:
            captured.give_up()
        self._lost = not (wrote and self._finish(name, reason, began_s, stopped_early=stopped_early))
        return not self._lost

    def settle(self) -> None:
        """Wait until nothing is being written beside training."""
        self._waited, in_flight, self._in_flight = False, self._in_flight, False
        if self._background is None or not in_flight:
            return
        began_s = time.monotonic()
        while not self._background.wait(POLL_S):  # the notice may come meanwhile
            told = self._session.stop.told_at_s is not None
            if told and self._left_s() <= BEFORE_THE_END_S and time.monotonic() - began_s >= 1.0:
                warn(f"{self._tried} is still being written and cannot be waited for any longer")
                return
        self._waited = not self._lost
        if (waited_s := time.monotonic() - began_s) > LONG_WAIT_S:
            say(f"training waited {waited_s:.1f} s for {self._tried}")

    def end(self) -> None:
        """Wait for what is being written, and give the memory back that it needed."""
        self.settle()
        if self._background is not None:
            self._background.close()

    def _left_s(self) -> float:
        """Return the time until the process is killed, if it was told to go."""
        settings, told_s = self._session.settings, self._session.stop.told_at_s
        return settings.grace_seconds - (0.0 if told_s is None else time.monotonic() - told_s)

    def _was_lost(self, name: str) -> bool:
        """Whether the save of this very step failed on any rank after training had gone on."""
        return self._background is not None and name == self._tried and not self._agreement.all_agree(not self._lost)

    def _finish_later(self, captured: Captured, name: str, reason: str, began_s: float, *, stopped_early: bool) -> None:
        assert self._background is not None
        self._in_flight = self._lost = True  # until it is known to be written
        held_s = time.monotonic() - began_s

        def then(error: Exception | None) -> None:
            if error is not None:
                self._failed(name, error)
            elif self._finish(name, reason, began_s, stopped_early=stopped_early, held_s=held_s):
                self._lost = False

        self._background.start(captured, self._volume / name, then)

    @property
    def _staged(self) -> bool:
        """Whether ``_write`` leaves the step below ``STAGING`` under its number in this call."""
        return False

    def _prepare(self, name: str, *, urgent: bool) -> bool:
        if self._background is not None and self._background.busy:
            return False  # told to go, and it cannot be waited for
        if self._world.local_rank != 0:
            return True
        try:
            if not (self._is_worth_trying() if urgent else self._has_room()):
                return False
            remove(self._volume / name)  # half-written, or of an earlier attempt that this run left behind
            shutil.rmtree(self._volume / STAGING, ignore_errors=True)
            self._records.clear(name)
        except OSError as error:
            warn(f"{name} is not saved: {error}")
            return False
        return True

    def _is_worth_trying(self) -> bool:
        """Whether a save just in time is: after one that was just waited for, only if it can be finished, too."""
        if not self._waited or fits(expected_s=self._save_s, left_s=self._left_s()):
            return True
        say(f"no newer checkpoint: a save takes about {self._save_s:.1f} s, {self._left_s():.1f} s are left")
        return False

    def _has_room(self) -> bool:
        return self._room.fits(self._last_bytes or self._expected_bytes())

    def make_room(self) -> None:
        """Before a save that is tried in any case: what is durable makes way for it."""
        if self._world.local_rank == 0:
            with contextlib.suppress(OSError):
                self._room.make(int(SPARE * (self._last_bytes or self._expected_bytes())))

    def _begin(self, model: Any, global_step: int, *, beside: bool) -> Captured | None:
        """Returns what is still to be written beside training; nothing if that is not how this is saved.

        Whoever asks for a save, or is about to end, waits for it.
        """
        if self._background is None or not beside:
            self._write(model, global_step)
            return None
        inside = f"{STAGING}/{checkpoint_name(global_step)}" if self._staged else self.name(global_step)
        return self._background.capture(
            self._volume / inside, functools.partial(self._write, model, global_step), optimizer=self._optimizer_that_waits()
        )

    def _write(self, model: Any, global_step: int) -> None:
        """Write this rank's files of a step.

        Raises:
            Exception: Whatever it is, it is said, and training goes on.
        """
        raise NotImplementedError

    def _about(self) -> dict[str, Any]:
        """Return what the marker says of every checkpoint, under ``meta``."""
        return {}

    def _write_final(self, folder: Path) -> None:
        """Write this rank's files of the final model.

        Raises:
            Exception: Whatever it is, it is said.
        """
        raise NotImplementedError

    def _expected_bytes(self) -> int:
        """Return the size of the first checkpoint, before there was one; 0: not known."""
        return 0

    def _optimizer_that_waits(self) -> Any:
        """Return what alone changes parameters, in its ``step()``; ``None``: anybody may."""
        return None

    def _leave_staging(self, global_step: int, name: str) -> bool:
        try:
            (self._volume / STAGING / checkpoint_name(global_step)).rename(self._volume / name)
        except OSError as error:
            self._failed(name, error)
            return False
        return True

    def _failed(self, name: str, error: Exception) -> None:
        warn(f"{name} could not be saved ({type(error).__name__}: {error}); training goes on, the older ones stand")
        with contextlib.suppress(OSError):
            remove(self._volume / name)
            shutil.rmtree(self._volume / STAGING, ignore_errors=True)

    def _finish(self, name: str, reason: str, began_s: float, *, stopped_early: bool, held_s: float | None = None) -> bool:
        folder = self._volume / name
        try:
            folder.mkdir(exist_ok=True)  # a node whose ranks write nothing takes part all the same
            if self._records.wrote(name):
                marker = self._marker(folder, reason, {META_STOPPED_EARLY: True} if stopped_early else {})
                finish(folder, marker)
                self._last_bytes = sum(file.size_bytes for file in marker.files or ())
                self._records.clear(name)
                self._rotate()
        except (OSError, ContractError) as error:
            self._failed(name, error)
            return False
        self._save_s = time.monotonic() - began_s
        held = "" if held_s is None else f", training held for {held_s:.2f} s"
        say(f"saved {name} ({reason}, {self._last_bytes / 1e6:.1f} MB in {self._save_s:.2f} s{held})")
        return True

    def _marker(self, folder: Path, reason: str, more: Mapping[str, Any], *, global_step: int | None = None) -> Marker:
        session, world = self._session, self._world
        meta = {META_TRAIN_CALL: session.train_calls, "base_step": session.base_step, **self._about(), **more}
        if session.origin is not None:
            meta[META_RESUMED_FROM] = session.origin
        if reason == "jit" and self.unfinished:
            meta[META_UNFINISHED] = list(self.unfinished)
        return Marker(
            step=step_of(folder.name) if global_step is None else session.base_step + global_step,
            reason=reason,
            created_at=rfc3339(time.time()),
            attempt=session.attempt,
            save_id=str(session.saves[folder.name]),
            node=Node(world.node, world.nodes),
            world_size=world.size,
            global_step_seconds=self.step_seconds,
            files=listed_files(folder),
            meta=meta,
        )

    def _rotate(self) -> None:
        limit = self._session.settings.save_total_limit
        if limit is None or self._world.local_rank != 0:
            return
        own = [c for c in finished_on(self._volume) if c.marker.meta.get(META_OWNER) != SCRIPT_OWNED]
        steps = [step for c in own if (step := step_of(c.name)) is not None]
        for step in surplus(steps, limit=limit):
            remove(self._volume / checkpoint_name(step))

    def save_final(self, global_step: int) -> None:
        """Write the final model to ``final/``."""
        folder = self._volume / FINAL
        ready = True
        if self._world.local_rank == 0:
            try:
                remove(folder)
                self._records.clear(FINAL)
            except OSError:
                ready = False
            self.make_room()
        if not self._agreement.all_agree(ready):
            return
        self._session.saves[FINAL] += 1
        try:
            self._write_final(folder)
            folder.mkdir(exist_ok=True)
            if self._records.wrote(FINAL):
                finish(folder, self._marker(folder, "final", {}, global_step=global_step))
                self._records.clear(FINAL)
        except Exception as error:
            warn(f"final/ could not be saved ({type(error).__name__}: {error}); the checkpoints stand")
            with contextlib.suppress(OSError):
                remove(folder)
            return
        say(f"saved final/ (step {self._session.base_step + global_step})")
