"""``python -m sidecar``, and the command ``checkpoint-sidecar``."""

import signal
import sys


def main() -> int:
    """Run a command and return its exit code."""
    if sys.argv[1:2] == ["run"]:
        # The kernel throws signals away that PID 1 of a container has no handler for: until the daemon has one, they wait.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from sidecar.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
