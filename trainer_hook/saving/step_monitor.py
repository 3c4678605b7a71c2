"""When all ranks save and when they stop: at the same step, with every library."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from trainer_hook.contract import checkpoint_name
from trainer_hook.process.log import info, warn
from trainer_hook.process.preemption import exit_if_ranks_hang, exit_preempted
from trainer_hook.process.rank_consensus import Vote
from trainer_hook.process.session import Session
from trainer_hook.saving.schedule import Schedule

STATE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Due:
    """What all ranks do now."""

    stop: bool = False
    reason: str | None = None
    """``periodic`` or ``manual``: a save is due. ``None``: none is."""


class StepMonitor:
    """Follows the steps of one ``train()`` call. Collective: every rank calls each method at the same step."""

    def __init__(self, session: Session) -> None:
        settings = session.settings
        self._session = session
        self._consensus = session.join()
        self.schedule = Schedule(settings.save_strategy, settings.save_steps, settings.save_minutes * 60)
        self._saved_s = time.monotonic()
        self._state_written_s = 0.0
        self._first: tuple[int, float] | None = None
        self._is_preempted = False
        """The ranks agreed to stop without a request for it: some pod has its termination notice."""
        self.step_seconds: float | None = None
        """Mean seconds per step; ``None`` before the second one."""

    def begin(self, step: int) -> None:
        """Training begins after a step of this call."""
        self._saved_s = time.monotonic()
        self._session.stop.on_notice = functools.partial(exit_if_ranks_hang, self._session)
        if self._session.stop.notice_at_s is not None:  # it came while the model was loaded
            exit_if_ranks_hang(self._session)
        self._session.tell_state("running", self._session.base_step + step)

    def at_step(self, step: int) -> Due:
        """Return what is due at the end of a step."""
        self._measure(step)
        return self._due(self._consensus.tick("train", self._vote), scheduled=self.schedule.due_at_step(step))

    def at_epoch_end(self) -> Due:
        """Return what is due between two epochs. The ranks always talk here: the script's code may have set them apart."""
        return self._due(self._consensus.tick("epoch", self._vote), scheduled=self.schedule.due_at_epoch_end())

    def inside(self, kind: str) -> Due:
        """Return what is due inside an evaluation or in other code that takes no steps; ``kind`` names it."""
        return self._due(self._consensus.tick(kind, self._vote), scheduled=False)

    def is_noticed(self) -> bool:
        """Whether a rank has its termination notice."""
        stop, jit = self._session.stop, self._session.settings.jit
        self._is_preempted = not self._consensus.all_agree(not (jit and stop.noticed()))
        return self._is_preempted

    def _due(self, vote: Vote, *, scheduled: bool) -> Due:
        self._is_preempted = vote.stop and not vote.manual
        if vote.manual:
            self._session.requests.take()
        return Due(vote.stop, "manual" if vote.manual else "periodic" if vote.save or scheduled else None)

    def saved(self, step: int, *, ok: bool) -> None:
        """Record that a save of a step succeeded or failed, and answer the request for it, if there was one."""
        self._saved_s = time.monotonic()
        if ok:  # so that no status has a durable step beyond the trained one
            self._tell_running(step)
        if self._consensus.world.local_rank == 0:
            self._session.requests.answer(checkpoint_name(self._session.base_step + step), saved=ok)

    def _vote(self) -> Vote:
        request = self._session.requests.poll()
        due = self.schedule.due_at_time(since_save_s=time.monotonic() - self._saved_s)
        asked_to_stop = request is not None and request.action == "save-and-stop"
        stop = asked_to_stop or (self._session.settings.jit and self._session.stop.noticed())
        return Vote(stop=stop, save=due or request is not None, manual=request is not None)

    def _measure(self, step: int) -> None:
        now_s = time.monotonic()
        if self._first is None:
            self._first = (step, now_s)
        elif step > self._first[0]:
            self.step_seconds = round((now_s - self._first[1]) / (step - self._first[0]), 6)
        if now_s - self._state_written_s >= STATE_EVERY_S:
            self._tell_running(step)

    def _tell_running(self, step: int) -> None:
        self._state_written_s = time.monotonic()
        self._session.tell_state("running", self._session.base_step + step)

    def stop(self, step: int, save: Callable[[], bool]) -> NoReturn:
        """Save the last finished step of this call just in time and end this process. ``save`` returns whether it succeeded."""
        notice_at_s = self._session.stop.notice_at_s
        if self._is_preempted and notice_at_s is None:  # the notice is for the pod of other ranks
            exit_if_ranks_hang(self._session)
        info(f"stops after a {stop_reason(has_notice=notice_at_s is not None, is_preempted=self._is_preempted)}")
        if (error := self._session.stop.suppressed) is not None:
            info(f"the script's own handler of SIGTERM raised {type(error).__name__}: the save goes first, then the exit")
        if not step:
            info("no step was finished yet: there is nothing to save")
        saved = bool(step) and save()
        if step and not saved:
            warn("the just-in-time checkpoint could not be saved")
        self.saved(step, ok=saved)
        if notice_at_s is not None:
            code = self._session.settings.preempted_exit_code
            info(f"exits {code}, {time.monotonic() - notice_at_s:.2f} s after the notice")
        exit_preempted(self._session, step)


def stop_reason(*, has_notice: bool, is_preempted: bool) -> str:
    """Return why this rank stops, for the log. ``is_preempted``: some rank of the job has its termination notice."""
    if has_notice:
        return "termination notice"
    return "termination notice of another rank" if is_preempted else "request to stop"
