"""The sidecar: watches the shared volume, makes finished checkpoints durable, serves resumes."""

from trainer_hook import __version__ as __version__
