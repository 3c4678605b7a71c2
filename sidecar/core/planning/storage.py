"""Space that the checkpoints of a run take on the volume that trainer and sidecar share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per parameter of the weights as they are saved."""
OPTIMIZER_BYTES = {"none": 0, "momentum": 4, "adamw": 8, "adamw-bf16": 4, "adamw-8bit": 2}
"""Bytes per parameter of the saved optimizer state: AdamW has two moments, SGD with momentum has one, fp32 unless named."""
HEADROOM = Fraction(6, 5)
"""Factor for file systems, logs, and sizes that are not known exactly."""
GUIDE_KEEP = 2
"""Default of ``CKPT_KEEP_LOCAL``, for which the multipliers of ``STRATEGIES`` are calibrated."""
MOST_PARAMETERS = 10**15
_COUNT = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)\s*([kmbt]?)", re.ASCII)
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a strategy of distributed training writes a checkpoint."""

    multiplier: Fraction
    """Size of one checkpoint as a multiple of the saved weights."""
    keeps_copies: bool
    """Each kept checkpoint takes this space. False: only the one being gathered does, those kept hold adapters."""


def _calibrated(storage_gb: int, weights_gb: int) -> Strategy:
    return Strategy(Fraction(storage_gb, weights_gb * (GUIDE_KEEP + 1)) / HEADROOM, keeps_copies=True)


STRATEGIES = {
    "ddp": _calibrated(275, 16),
    "fsdp": _calibrated(200, 14),
    "zero3-lora": Strategy(Fraction(1), keeps_copies=False),
}
"""Derived, not quoted: the guide to checkpointing on OpenShift AI gives three results, DDP 8B 275 GB, FSDP 7B 200 GB and
ZeRO-3 70B LoRA 168 GB. Its own multipliers were not available. These give the same results from bf16 weights, two kept
checkpoints, one being written, and a fifth of headroom."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Space on the volume."""

    checkpoint_bytes: int
    """One checkpoint."""
    copies: int
    """Checkpoints that are on the volume at the same time, the one being written included."""
    storage_bytes: int
    """All of them, with headroom."""


def parameter_count(text: str) -> int:
    """Return the number that ``8B``, ``70b``, ``1.5B``, ``350M`` or ``124000000`` stands for; B is 10⁹.

    Raises:
        ValueError: Anything else, zero, and more than ``MOST_PARAMETERS``.
    """
    match = _COUNT.fullmatch(text.strip().lower())
    count = int(Decimal(match[1]) * _COUNT_UNITS[match[2]]) if match else 0
    if not 0 < count <= MOST_PARAMETERS:
        raise ValueError("must be a number of parameters such as 350M, 8B or 70B, at most 1000T")
    return count


def guide_storage(parameters: int, *, strategy: str, dtype: str = "bf16", keep: int = GUIDE_KEEP) -> Storage:
    """Return the space by the multiplier of a strategy.

    Args:
        parameters: Number of parameters of the model, its frozen ones included.
        strategy: A name of ``STRATEGIES``.
        dtype: A name of ``DTYPE_BYTES``.
        keep: Durable checkpoints that stay on the volume, ``CKPT_KEEP_LOCAL``.
    """
    known = STRATEGIES[strategy]
    return _storage(parameters * DTYPE_BYTES[dtype] * known.multiplier, copies=keep + 1 if known.keeps_copies else 1)


def state_storage(
    parameters: int, *, optimizer: str, dtype: str = "bf16", master: bool = False, keep: int = GUIDE_KEEP
) -> Storage:
    """Return the space by what a checkpoint holds: weights, optimizer state, and fp32 master weights where there are some.

    Args:
        parameters: Number of trained parameters.
        optimizer: A name of ``OPTIMIZER_BYTES``.
        dtype: A name of ``DTYPE_BYTES``.
        master: The checkpoint holds fp32 master weights besides those of ``dtype``.
        keep: Durable checkpoints that stay on the volume, ``CKPT_KEEP_LOCAL``.
    """
    per_parameter = DTYPE_BYTES[dtype] + OPTIMIZER_BYTES[optimizer] + (DTYPE_BYTES["fp32"] if master else 0)
    return _storage(Fraction(parameters * per_parameter), copies=keep + 1)


def measured_storage(checkpoint_bytes: int, *, keep: int = GUIDE_KEEP) -> Storage:
    """Return the space for checkpoints of a known size in bytes."""
    return _storage(Fraction(checkpoint_bytes), copies=keep + 1)


def _storage(checkpoint_bytes: Fraction, *, copies: int) -> Storage:
    return Storage(math.ceil(checkpoint_bytes), copies, math.ceil(checkpoint_bytes * copies * HEADROOM))
