"""The sidecar: watches the shared volume, makes finished checkpoints durable, serves resumes."""

__version__ = "0.1.0"
