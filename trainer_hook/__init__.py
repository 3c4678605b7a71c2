"""The trainer's side: saves, marks finished checkpoints, resumes. Standard library only at import."""

__version__ = "0.1.0"

PACKAGE = "trainer_hook"
CURRENT = "trainer_hook-current"
"""Link in a folder that ``install-hook`` made: it names the folder that holds the package."""
