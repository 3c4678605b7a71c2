"""Files of a Trainer's checkpoint: what one lacks, what its state says, how large the first one will be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_hook.contract import ContractError
from trainer_hook.contract.typed_json import integer, json_object, number, typed

STATE = "trainer_state.json"
META_STOPPED_EARLY = "stopped_early"
"""Key in ``meta``: a callback ended training at this step, before the last one."""
_ADAPTER = "adapter_model."
_WEIGHTS = ("model", "pytorch_model", "adapter_model", "tf_model", "flax_model")


def missing_from(files: Mapping[str, int], *, rank: int, world_size: int, saved_world_size: int | None) -> list[str]:
    """Return what a checkpoint lacks for one rank. Arguments as of ``Driver.missing_files``.

    Trainer itself loads the files that are there: without ``optimizer.pt`` or ``scheduler.pt`` it silently begins both anew.
    """
    tops = {name.split("/", 1)[0] for name in files}
    sharded = any(top.startswith("global_step") for top in tops)  # DeepSpeed keeps weights and optimizer there
    missing = [] if STATE in files else [STATE]
    if not sharded and not any(map(_has_weights, files)):
        missing.append("the model's weights")
    if not sharded and not any(top.startswith("optimizer") for top in tops):
        missing.append("optimizer.pt")
    if "scheduler.pt" not in files and not sharded:
        missing.append("scheduler.pt")
    rng = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
    if rng not in files and saved_world_size in (None, world_size):
        missing.append(rng)
    return missing


def _has_weights(path: str) -> bool:
    top, _, below = path.partition("/")
    return top.startswith(_WEIGHTS) or below.startswith(_ADAPTER)  # an adapter of PEFT with a name has a folder of that name


def is_finished(state: Mapping[str, Any], meta: Mapping[str, Any], *, max_steps: int, epochs: float) -> bool:
    """Whether training ends at ``state``. Trainer itself would train one more step.

    ``state``: content of ``trainer_state.json``. ``meta``: of the marker. ``max_steps`` 0 or less: ``epochs`` is the limit.
    """
    if meta.get(META_STOPPED_EARLY):
        return True
    if max_steps > 0:
        return bool(state.get("global_step", 0) >= max_steps)
    return bool((state.get("epoch") or 0.0) >= epochs - 1e-6)


def read_state(folder: Path) -> dict[str, Any]:
    """Return ``trainer_state.json`` of a checkpoint, or an empty one: it is not there, or malformed."""
    try:
        return parse_state((folder / STATE).read_bytes())
    except (OSError, ContractError):
        return {}


def parse_state(raw: bytes) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``.

    Raises ``ContractError``: Trainer could not load it, or its position is not a number.
    """
    try:
        state = json_object(raw, what=STATE)
        integer(state, "global_step")
        for name in ("max_steps", "num_train_epochs", "epoch"):
            number(state, name)
        for name, kind in (("log_history", list), ("stateful_callbacks", dict), ("best_model_checkpoint", str)):
            typed(state, name, kind)
        if not all(isinstance(entry, dict) for entry in state.get("log_history") or ()):
            raise ContractError("log_history must hold objects")
    except ContractError as error:
        raise ContractError(f"{STATE}: {error}") from None
    return state


def state_bytes(trainer: Any) -> int:
    """Return the estimated size of a Trainer's first checkpoint on this node: weights and optimizer state.

    State that DeepSpeed or an unknown kind of model or optimizer holds is not counted: the first save is then tried.
    """
    try:
        tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
        if hasattr(trainer.model, "peft_config"):  # only the adapter is saved
            tensors = [tensor for tensor in tensors if tensor.requires_grad]
        states = (getattr(trainer.optimizer, "state", None) or {}).values()
        tensors += [value for state in states for value in state.values() if hasattr(value, "element_size")]
        own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)  # this rank's shard of a DTensor
        return sum(int(tensor.numel() * tensor.element_size()) for tensor in own)
    except Exception:
        return 0
