"""Blocks SIGTERM in a thread that forks, from before the fork until all callbacks of the fork have run.

A child that gets it earlier has lost it: Python clears what has arrived, and ignores exceptions in callbacks. The sender
would wait for ever.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading

from trainer_hook.process.system_exit import raise_later

_SIGTERM = frozenset({signal.SIGTERM})


class ForkMask:
    """One per process. Install it once, after the callbacks that have to run before the child gets a signal."""

    def __init__(self) -> None:
        self._masks: dict[int, set[int | signal.Signals]] = {}
        """Signal masks of forking threads before the fork, by thread identity."""
        self._modules = self._last = 0
        """Number of imported modules at the last registration, and number of registrations."""

    def install(self) -> None:
        """Begin with the next fork."""
        os.register_at_fork(before=self._block)

    def _block(self) -> None:
        if len(sys.modules) != self._modules:  # libraries register callbacks at their import: ours is to be the last one
            self._modules = len(sys.modules)
            self._last += 1
            unblock = functools.partial(self._unblock, self._last)
            os.register_at_fork(after_in_parent=unblock, after_in_child=unblock)
        thread = threading.get_ident()
        try:
            self._masks[thread] = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)
        except BaseException as error:  # of a handler that has just run
            self._masks[thread] = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM) - _SIGTERM
            raise_later(error)

    def _unblock(self, number: int) -> None:
        if number != self._last or (mask := self._masks.pop(threading.get_ident(), None)) is None:
            return
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException as error:  # of the handler that has just run: Python drops it in a callback
            raise_later(error)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # the handler may have run first
