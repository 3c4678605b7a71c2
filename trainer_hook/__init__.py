"""The trainer's side: saves, marks finished checkpoints, resumes. Standard library only at import."""

__version__ = "0.1.0"
