"""``python -m trainer_hook``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer_hook import __version__
from trainer_hook.activation.run_command import EXIT_CONFIGURATION, run

USAGE = """usage: python -m trainer_hook run -- COMMAND [ARGUMENT ...]

Runs a training command (python, torchrun, accelerate launch, …) so that its checkpoints are saved, marked and resumed
without changing the script. Settings come from CKPT_* in the environment; those of neither container are refused.
"""


def main(arguments: Sequence[str]) -> int:
    """Return the exit code, unless the process became the command."""
    match list(arguments):
        case ["run", "--", *command] | ["run", *command]:
            return run(command)
        case ["--version"]:
            print(f"trainer_hook {__version__}")  # noqa: T201
            return 0
        case ["-h" | "--help"]:
            print(USAGE)  # noqa: T201
            return 0
        case _:
            print(USAGE, file=sys.stderr)  # noqa: T201
            return EXIT_CONFIGURATION


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
