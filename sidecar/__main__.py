"""``python -m sidecar``, and the command ``checkpoint-sidecar``."""

import gc
import signal
import sys

from sidecar.cli import streams

_NOT_INSTALLED = ("rich", "httpx", "httpx2")
"""Packages that libraries of the sidecar import where they are installed, for what it does not do: structlog for tracebacks in
colour, aiobotocore for another transport."""


def main() -> int:
    """Run a command and return its exit code."""
    streams.prepare()
    if sys.argv[1:2] == ["run"]:
        # The kernel throws signals away that PID 1 of a container has no handler for: until the daemon has one, they wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        # Nearly all objects made by imports stay, so collecting them is in vain: the daemon turns the collector on.
        gc.disable()
        for unneeded in _NOT_INSTALLED:
            sys.modules.setdefault(unneeded, None)  # type: ignore[arg-type]  # as if it were not installed
    from sidecar.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
