"""Patches of launchers that do not forward SIGTERM, or whose exit code hides that their ranks were preempted."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from trainer_hook.contract import DEFAULT_DIR, PREEMPTED_EXIT_CODE, TRAINER_STATE, ContractError, parse_trainer_state

_CLOCK_S = 1.0
"""Resolution of a file system's times, in seconds."""


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

    A pod that is not preempted itself also ends so when another node of its job is: with 1 it would count as a failure. This
    holds, too, where the other node, with the rendezvous on it, is gone before this one has seen the end of its ranks.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError

    original = launcher_module.launch_agent

    @functools.wraps(original)
    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        began_s = time.time()
        try:
            return original(*args, **kwargs)
        except launcher_module.ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            preempted = _preempted_exit_code()
            # Ranks that did not end by themselves were ended by torchrun, after the first one had.
            if preempted in codes and codes <= {preempted, -signal.SIGTERM}:
                raise SystemExit(preempted) from None
            raise
        except RendezvousError:  # torchrun has ended its ranks
            if _is_preempted(since_s=began_s):
                raise SystemExit(_preempted_exit_code()) from None
            raise
        except launcher_module.SignalException as error:  # torchrun itself got the signal, and passed it on
            if error.sigval == signal.SIGTERM:
                raise SystemExit(_preempted_exit_code()) from None
            raise

    launcher_module.launch_agent = launch_agent


def _is_preempted(*, since_s: float) -> bool:
    """Whether the ranks of this node said since then, in ``trainer.json``, that they ended as preempted."""
    file = Path(os.environ.get("CKPT_DIR") or DEFAULT_DIR) / TRAINER_STATE
    try:
        return file.stat().st_mtime >= since_s - _CLOCK_S and parse_trainer_state(file.read_bytes()).state == "preempted"
    except (OSError, ContractError):
        return False


def _preempted_exit_code() -> int:
    try:
        return int(os.environ.get("CKPT_PREEMPTED_EXIT_CODE") or PREEMPTED_EXIT_CODE)
    except ValueError:  # reported when the settings are read
        return PREEMPTED_EXIT_CODE


@contextmanager
def _forwarding() -> Iterator[None]:
    children: list[subprocess.Popen[Any]] = []
    starting: list[object] = []
    held: list[int] = []  # signals while a child is started, whose process is not known yet
    original = subprocess.Popen.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        starting.append(self)
        try:
            original(self, *args, **kwargs)
            children.append(self)
        finally:
            starting.remove(self)
            if held and not starting:
                forward(held.pop(), None)

    def forward(number: int, frame: FrameType | None) -> None:
        alive = [child for child in children if child.poll() is None]
        for child in alive:
            child.send_signal(number)
        if starting:
            held[:] = [number]
        elif not alive:
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, forward)
    subprocess.Popen.__init__ = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, before)
