"""Patches of launchers that do not forward SIGTERM: their ranks would train until they are killed."""

from __future__ import annotations

import functools
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
