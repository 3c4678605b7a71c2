"""SIGTERM for PID 1 of a container before the hook handles signals."""

from __future__ import annotations

import os
import signal


def default_action(number: int, _: object) -> None:
    """Do for PID 1 what the kernel does for every other process."""
    if os.getpid() == 1:
        os._exit(128 + number)
    signal.signal(number, signal.SIG_DFL)  # a forked child
    os.kill(os.getpid(), number)


def end_by_sigterm() -> None:
    """Have SIGTERM end this process, unless it has a handler.

    The kernel drops signals without a handler for PID 1 of a container: a script that still loads its model would run until
    the grace period is over.
    """
    if os.environ.get("CKPT_JIT") != "0" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, default_action)
