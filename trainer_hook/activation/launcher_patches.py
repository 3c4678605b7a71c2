"""Patches of launchers that do not forward SIGTERM, or whose exit code hides that their ranks were preempted."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainer_hook.contract import PREEMPTED_EXIT_CODE


def patch_accelerate(launch_module: Any) -> None:
    """Make ``accelerate launch`` with one process forward SIGTERM to it and exit as it does."""
    original = launch_module.simple_launcher

    def simple_launcher(args: Any) -> Any:
        with _forwarding():
            try:
                return original(args)
            except subprocess.CalledProcessError as error:
                raise SystemExit(error.returncode if error.returncode >= 0 else 128 - error.returncode) from None

    launch_module.simple_launcher = simple_launcher


def patch_deepspeed(runner_module: Any) -> None:
    """Make the ``deepspeed`` command forward SIGTERM to the node's launcher, which forwards it to its ranks."""
    original = runner_module.main

    @functools.wraps(original)
    def main(*args: Any, **kwargs: Any) -> Any:
        with _forwarding():
            return original(*args, **kwargs)

    runner_module.main = main


def patch_torchrun(launcher_module: Any) -> None:
    """Make ``torchrun`` exit as its ranks do where it got SIGTERM, or all that failed were preempted; its own exit code is 1.

    A pod that is not preempted itself also ends so when another node of its job is: with 1 it would count as a failure.
    """
    original = launcher_module.launch_agent

    @functools.wraps(original)
    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except launcher_module.ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            preempted = _preempted_exit_code()
            # Ranks that did not end by themselves were ended by torchrun, after the first one had.
            if preempted in codes and codes <= {preempted, -signal.SIGTERM}:
                raise SystemExit(preempted) from None
            raise
        except launcher_module.SignalException as error:  # torchrun itself got the signal, and passed it on
            if error.sigval == signal.SIGTERM:
                raise SystemExit(_preempted_exit_code()) from None
            raise

    launcher_module.launch_agent = launch_agent


def _preempted_exit_code() -> int:
    try:
        return int(os.environ.get("CKPT_PREEMPTED_EXIT_CODE") or PREEMPTED_EXIT_CODE)
    except ValueError:  # reported when the settings are read
        return PREEMPTED_EXIT_CODE


@contextmanager
def _forwarding() -> Iterator[None]:
    children: list[subprocess.Popen[Any]] = []
    original = subprocess.Popen.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        children.append(self)

    def forward(number: int, frame: FrameType | None) -> None:
        alive = [child for child in children if child.poll() is None]
        for child in alive:
            child.send_signal(number)
        if not alive:
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, forward)
    subprocess.Popen.__init__ = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, before)
