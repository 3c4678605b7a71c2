"""``accelerate launch`` with one process does not pass SIGTERM on: its trainer would train on until it is killed."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def patch(launch_module: Any) -> None:
    """Make ``simple_launcher`` forward SIGTERM to its child and exit as the child does."""
    original = launch_module.simple_launcher

    def simple_launcher(args: Any) -> Any:
        with _forwarding():
            try:
                return original(args)
            except subprocess.CalledProcessError as error:
                raise SystemExit(error.returncode if error.returncode >= 0 else 128 - error.returncode) from None

    launch_module.simple_launcher = simple_launcher


@contextmanager
def _forwarding() -> Iterator[None]:
    children: list[subprocess.Popen[Any]] = []
    original = subprocess.Popen.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        children.append(self)

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = signal.signal(signal.SIGTERM, forward)
    subprocess.Popen.__init__ = remember  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, before)
