"""Exit codes of the sidecar and of all its commands (FORMAT.md, "Exit codes")."""

from __future__ import annotations

EXIT_DONE = 0
"""Success: every finished checkpoint is durable."""
EXIT_FAILED = 1
"""A bug, or a failed command."""
EXIT_CONFIGURATION = 2
"""A setting is wrong, or the store refuses access."""
EXIT_GIVEN_UP = 3
"""A finished checkpoint is not durable."""
EXIT_FENCED = 4
"""A later pod took the prefix over."""
EXIT_NOTHING = 5
"""There is nothing to resume from, or no such checkpoint."""
EXIT_UNREACHABLE = 6
"""The sidecar, or the store, does not answer."""
EXIT_REFUSED = 7
"""The command was refused: it would harm a live run or a checkpoint, or the sidecar answered with an error."""
EXIT_DAMAGED = 8
"""A checkpoint in the store failed verification; of ``pull``: an older one was taken in place of the newest."""
EXIT_INTERRUPTED = 130
"""A person interrupted the command (SIGINT), as shells count it."""
