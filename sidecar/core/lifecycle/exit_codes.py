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
