"""When to save and when to stop, at the same step on every rank, whichever library trains."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from trainer_hook.contract import checkpoint_name
from trainer_hook.process.log import say, warn
from trainer_hook.process.rank_consensus import Wish
from trainer_hook.process.session import Session
from trainer_hook.process.signals import end_surely
from trainer_hook.saving.schedule import Schedule

STATE_EVERY_S = 2.0
EXIT_WITHIN_S = 10.0
BEFORE_THE_END_S = 2.0
"""How long before the end of the grace period a rank stops to wait for the others."""
HANGS_AFTER_S = 1.0
"""Shorter waits are the rule."""


@dataclass(frozen=True, slots=True)
class Due:
    """What all ranks do now."""

    stop: bool = False
    reason: str | None = None
    """``periodic`` or ``manual``: a save is due."""


class StepMonitor:
    """Follows the steps of one ``train()`` call. Collective: every rank calls each method at the same step."""

    def __init__(self, session: Session) -> None:
        settings = session.settings
        self._session = session
        self._agreement = session.join()
        self.schedule = Schedule(settings.save_strategy, settings.save_steps, settings.save_minutes * 60)
        self._saved_s = time.monotonic()
        self._told_state_s = 0.0
        self._first: tuple[int, float] | None = None
        self._is_going = False
        """All agreed to stop, and nobody asked for that: some pod is told to go."""
        self.step_seconds: float | None = None
        """Seconds per step, as measured; ``None`` before the second one."""

    def begin(self, step: int) -> None:
        """Training begins after a step of this call."""
        self._saved_s = time.monotonic()
        self._session.stop.when_told = functools.partial(end_if_others_hang, self._session)
        self._session.tell_state("running", self._session.base_step + step)

    def at_step(self, step: int) -> Due:
        """Return what is due now that a step has ended."""
        self._measure(step)
        wish = self._agreement.tick("train", self.wish)
        return self._heeded(wish, scheduled=self.schedule.due_at_step(step))

    def at_epoch_end(self) -> Due:
        """Return what is due between two epochs. All ranks talk: after what a script does there they may be far apart."""
        wish = self._agreement.tick("epoch", self.wish)
        return self._heeded(wish, scheduled=self.schedule.due_at_epoch_end())

    def inside(self, kind: str) -> Due:
        """Return what is due in the middle of something else than training, such as an evaluation."""
        return self._heeded(self._agreement.tick(kind, self.wish), scheduled=False)

    def _heeded(self, wish: Wish, *, scheduled: bool) -> Due:
        self._is_going = wish.stop and not wish.manual
        if wish.manual:
            self._session.requests.take()
        return Due(wish.stop, "manual" if wish.manual else "periodic" if wish.save or scheduled else None)

    def saved(self, step: int, *, ok: bool) -> None:
        """A save of a step was made, or tried: whoever asked for one is told."""
        self._saved_s = time.monotonic()
        if self._agreement.world.local_rank == 0:
            self._session.requests.answer(checkpoint_name(self._session.base_step + step), saved=ok)

    def wish(self) -> Wish:
        """Return what this rank wants."""
        request = self._session.requests.poll()
        due = self.schedule.due_at_time(since_save_s=time.monotonic() - self._saved_s)
        asked_to_stop = request is not None and request.action == "save-and-stop"
        stop = asked_to_stop or (self._session.settings.jit and self._session.stop.told())
        return Wish(stop=stop, save=due or request is not None, manual=request is not None)

    def _measure(self, step: int) -> None:
        now_s = time.monotonic()
        if self._first is None:
            self._first = (step, now_s)
        elif step > self._first[0]:
            self.step_seconds = round((now_s - self._first[1]) / (step - self._first[0]), 6)
        if now_s - self._told_state_s >= STATE_EVERY_S:
            self._told_state_s = now_s
            self._session.tell_state("running", self._session.base_step + step)

    def stop(self, step: int, save: Callable[[], bool]) -> NoReturn:
        """Save just in time and end this process.

        Args:
            step: The last finished one of this call; with 0 there is nothing to save.
            save: Returns whether the step is saved.
        """
        told_s = self._session.stop.told_at_s
        if self._is_going and told_s is None:  # the pod of other ranks is
            end_if_others_hang(self._session)
        say("stops here: " + ("the pod is going" if told_s is not None else "it was asked for"))
        if not step:
            say("no step was finished yet: there is nothing to save")
        saved = bool(step) and save()
        if step and not saved:
            warn("the just-in-time checkpoint could not be saved; the newest finished one stands")
        self.saved(step, ok=saved)
        if told_s is not None:
            say(f"exits {self._session.settings.preempted_exit_code}, {time.monotonic() - told_s:.2f} s after the notice")
        leave(self._session, step)


def end_if_others_hang(session: Session) -> None:
    """See that from the end of the grace period on this process does not wait for other ranks.

    A rank that dies closes its connections. One that hangs, such as on a volume that does not answer, keeps them open: the
    newest step that all had committed stands, and what waits for it would only be killed.
    """
    threading.Thread(target=_end_a_wait, args=(session,), name="checkpoint-others", daemon=True).start()


def _end_a_wait(session: Session) -> None:
    time.sleep(max(0.0, session.settings.grace_seconds - BEFORE_THE_END_S))
    agreement = session.join()  # long done
    while (since_s := agreement.waits_since_s) is None or time.monotonic() - since_s < HANGS_AFTER_S:
        time.sleep(HANGS_AFTER_S / 4)
    warn("another rank does not answer and the grace period is over: ends without it; the newest committed step stands")
    session.tell_state("preempted", session.last_step)
    os._exit(session.settings.preempted_exit_code)


def leave(session: Session, step: int) -> NoReturn:
    """End this rank after a just-in-time save: with a code that is not taken for success."""
    session.outcome = "preempted"
    session.tell_state("preempted", session.base_step + step)
    code = session.settings.preempted_exit_code
    # A rank that ends early makes its launcher end the others: all wait for the slowest save, but not past the grace period.
    end_surely(code, within_s=max(EXIT_WITHIN_S, session.settings.grace_seconds - EXIT_WITHIN_S))
    with contextlib.suppress(RuntimeError):
        session.join().all_agree(True)
    end_surely(code, within_s=EXIT_WITHIN_S)
    if threading.current_thread() is not threading.main_thread():
        session.left_in_thread = True
        session.stop.end_main_thread()
    raise SystemExit(code)
