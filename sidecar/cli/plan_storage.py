"""``plan storage``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from sidecar.cli.estimate import Measured, Size, measured_size_bytes, parsed, parsed_bytes, print_estimate
from sidecar.cli.options import Json
from sidecar.core.planning.storage import (
    DTYPE_BYTES,
    GUIDE_KEEP,
    HEADROOM,
    OPTIMIZER_BYTES,
    STRATEGIES,
    guide_storage,
    measured_storage,
    parameter_count,
    state_storage,
)
from sidecar.errors import ConfigurationError

GUIDE = (
    "results of the guide to checkpointing on OpenShift AI (DDP 8B 275 GB, FSDP 7B 200 GB, ZeRO-3 70B LoRA 168 GB); "
    "the multipliers are derived from these, for bf16 and 2 kept checkpoints"
)
STATE = "dtype and optimizer: AdamW has two moments per parameter, SGD with momentum has one"
MEASURED = "sizes in /v1/checkpoints of the running sidecar, the largest"


def storage(
    parameters: Annotated[str | None, typer.Option(metavar="COUNT", help="of the model, such as 8B")] = None,
    strategy: Annotated[Literal["ddp", "fsdp", "zero3-lora"] | None, typer.Option(help="multiplier of the guide")] = None,
    optimizer: Annotated[
        Literal["none", "momentum", "adamw", "adamw-bf16", "adamw-8bit"] | None, typer.Option(help="its saved state")
    ] = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16", "fp8"], typer.Option(help="of the saved weights")] = "bf16",
    master: Annotated[bool, typer.Option("--master", help="with --optimizer: fp32 master weights are saved, too")] = False,
    size: Size = None,
    measured: Measured = False,
    keep: Annotated[int, typer.Option(min=1, max=10_000, help="checkpoints kept on the volume, CKPT_KEEP_LOCAL")] = GUIDE_KEEP,
    as_json: Json = False,
) -> int:
    """Space on the volume: from --parameters with --strategy or --optimizer, from --size, or --measured.

    Formula: storage = checkpoint x (keep + 1) x 1.2; the one more is the checkpoint being written.
    With --strategy: checkpoint = parameters x bytes of the dtype x multiplier. The multipliers are derived from the results
    of the OpenShift AI guide: DDP 8B 275 GB, FSDP 7B 200 GB, ZeRO-3 70B LoRA 168 GB (there only the gathered weights count).
    With --optimizer: checkpoint = parameters x (bytes of the dtype + of the optimizer + of master weights).
    """
    _require_one_way(parameters, strategy, optimizer, size, measured=measured)
    if master and optimizer is None:
        raise ConfigurationError("--master: needs --optimizer")
    inputs: dict[str, Any] = {"keep": keep, "headroom": float(HEADROOM)}
    if size is not None or measured:
        one = parsed_bytes("--size", size) if size is not None else measured_size_bytes()
        needed, source, what = measured_storage(one, keep=keep), MEASURED if measured else "--size", "its size"
        return print_estimate(
            f"storage = checkpoint x (keep + 1) x headroom; checkpoint = {what}",
            source,
            inputs,
            asdict(needed),
            as_json=as_json,
        )
    count = parsed("--parameters", parameters or "", parameter_count)
    inputs |= {"parameters": count, "dtype": dtype, "dtype_bytes": DTYPE_BYTES[dtype]}
    if strategy is not None:
        known = STRATEGIES[strategy]
        inputs |= {"strategy": strategy, "multiplier": float(known.multiplier)}
        needed = guide_storage(count, strategy=strategy, dtype=dtype, keep=keep)
        copies = "(keep + 1)" if known.keeps_copies else "1 gathered copy (those kept hold adapters)"
        formula = f"storage = checkpoint x {copies} x headroom; checkpoint = parameters x dtype bytes x multiplier"
        return print_estimate(formula, GUIDE, inputs, asdict(needed), as_json=as_json)
    inputs |= {"optimizer": optimizer, "optimizer_bytes": OPTIMIZER_BYTES[optimizer or "none"], "master": master}
    needed = state_storage(count, optimizer=optimizer or "none", dtype=dtype, master=master, keep=keep)
    formula = "storage = checkpoint x (keep + 1) x headroom; checkpoint = parameters x (dtype + optimizer + 4 for master bytes)"
    return print_estimate(formula, STATE, inputs, asdict(needed), as_json=as_json)


def _require_one_way(
    parameters: str | None, strategy: str | None, optimizer: str | None, size: str | None, *, measured: bool
) -> None:
    ways = [parameters is not None and strategy is not None, parameters is not None and optimizer is not None]
    ways += [size is not None, measured]
    if parameters is not None:
        parsed("--parameters", parameters, parameter_count)  # before what is missing
        if sum(ways) == 0:
            raise ConfigurationError("--parameters: add --strategy (ddp, fsdp, zero3-lora) or --optimizer (such as adamw)")
    if sum(ways) != 1 or (parameters is not None and not any(ways[:2])) or (parameters is None and (strategy or optimizer)):
        raise ConfigurationError("one of: --parameters with --strategy, --parameters with --optimizer, --size, --measured")
