"""Tests that need more than the oldest versions of the libraries (``make test-oldest``)."""

from __future__ import annotations

from importlib import metadata

import pytest


def installed(name: str) -> tuple[int, ...]:
    """Return the version of a package to its minor number, such as ``(2, 5)``; ``(0,)``: it is not installed."""
    try:
        return tuple(int(part) for part in metadata.version(name).split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0,)


SHARDS_ON_CPU = pytest.mark.skipif(installed("torch") < (2, 6), reason="FSDP2 needs a GPU before PyTorch 2.6")
SAVES_BY_A_PROCESS = pytest.mark.skipif(installed("torch") < (2, 7), reason="torch.distributed.checkpoint has it from 2.7 on")
TRAINER_5 = pytest.mark.skipif(installed("transformers") < (5,), reason="of transformers 5")
"""It has what the test uses, or does not have a defect on CPUs that the test meets."""
