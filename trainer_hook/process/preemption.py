"""The end of a rank after a termination notice: with the others, or without those that hang."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import NoReturn

from trainer_hook.process.log import warn
from trainer_hook.process.session import Session
from trainer_hook.process.signals import exit_within, start_thread
from trainer_hook.process.system_exit import exit_with

EXIT_TIMEOUT_S = 10.0
RANKS_MARGIN_S = 2.0
"""Seconds before the end of the grace period at which a rank stops waiting for the others."""
HANG_THRESHOLD_S = 1.0
"""Seconds in a collective after which it counts as hanging, at the end of the grace period."""


def exit_if_ranks_hang(session: Session) -> None:
    """End this process if it still waits for other ranks at the end of the grace period. Returns at once.

    A dead rank's connections are closed, so that collectives fail. A rank that hangs, for example on a volume that does not
    answer, keeps them open, and waiting for it would end in SIGKILL. The newest committed step remains the one to resume.
    """
    start_thread(threading.Thread(target=_watch_collectives, args=(session,), name="checkpoint-others", daemon=True))


def _watch_collectives(session: Session) -> None:
    time.sleep(max(0.0, session.stop.left_s() - RANKS_MARGIN_S))
    consensus = session.join()  # joined long ago: returns at once
    while (since_s := consensus.waits_since_s) is None or time.monotonic() - since_s < HANG_THRESHOLD_S:
        time.sleep(HANG_THRESHOLD_S / 4)
    warn("another rank does not answer and the grace period is over: ends without it; the newest committed step stands")
    session.tell_state("preempted", session.last_step)
    os._exit(session.settings.preempted_exit_code)


def exit_preempted(session: Session, step: int) -> NoReturn:
    """End this rank after a just-in-time save, with the exit code for preemption."""
    session.outcome = "preempted"
    session.tell_state("preempted", session.base_step + step)
    code = session.settings.preempted_exit_code
    # If one rank ends, its launcher ends the others. So all ranks wait for the slowest save, within the grace period.
    exit_within(code, within_s=max(EXIT_TIMEOUT_S, session.stop.left_s() - EXIT_TIMEOUT_S))
    with contextlib.suppress(RuntimeError):
        session.join().all_agree(True)
    exit_within(code, within_s=EXIT_TIMEOUT_S)
    if threading.current_thread() is not threading.main_thread():
        session.left_in_thread = True
        session.stop.end_main_thread()
    raise exit_with(code)
