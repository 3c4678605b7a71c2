"""SIGTERM for PID 1 of a container before the hook handles signals."""

from __future__ import annotations

import os
import signal

from trainer_hook.process.switches import is_off


def default_action(number: int, _: object) -> None:
    """Do for PID 1 what the kernel does for every other process, once no process below it trains: all end with PID 1."""
    if os.getpid() == 1:
        signal.signal(number, lambda *_: None)
        code = 128 + number
        try:
            code = _wait_for_trainers() or code
        finally:
            os._exit(code)
    signal.signal(number, signal.SIG_DFL)  # a forked child
    os.kill(os.getpid(), number)


def _wait_for_trainers() -> int | None:
    """Return the exit code if a process trained; ``None``: none did."""
    # Imported only now: every Python that is PID 1 of a container imports this module at its start.
    from trainer_hook.process.settings import from_environment
    from trainer_hook.process.signals import StopSignal
    from trainer_hook.process.trainers_below import trainers_below

    settings = from_environment(os.environ)
    if not trainers_below(settings.dir, ranks=True):
        return None
    stop = StopSignal(settings.dir, exit_code=settings.preempted_exit_code, grace_s=settings.grace_seconds)
    stop.wait_for_trainers(tell=True, ranks=True)
    return settings.preempted_exit_code


def end_by_sigterm() -> None:
    """Have SIGTERM end this process, unless it has a handler.

    The kernel drops signals without a handler for PID 1 of a container: a script that still loads its model would run until
    the grace period is over.
    """
    if not is_off(os.environ.get("CKPT_JIT", "")) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, default_action)
