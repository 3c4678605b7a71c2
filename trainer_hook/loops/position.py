"""``progress.json`` in the checkpoint of a loop or of Lightning: the position in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_hook.contract import ContractError
from trainer_hook.contract.typed_json import integer, json_object, typed

PROGRESS = "progress.json"


def read_position(folder: Path) -> dict[str, Any]:
    """Return the position of a checkpoint: ``step``, ``epoch``, ``batch``, ``world_size``, and what its library adds.

    Raises:
        ContractError: It is malformed.
        OSError: It cannot be read.
    """
    return parse_position((folder / PROGRESS).read_bytes())


def parse_position(raw: bytes) -> dict[str, Any]:
    """Return the content of ``progress.json``. Raises ``ContractError``: a field is missing or of another type."""
    try:
        position = json_object(raw, what=PROGRESS)
        for name, least in (("step", 0), ("epoch", 0), ("batch", 0), ("world_size", 1)):
            if integer(position, name, least=least) is None:
                raise ContractError(f"{name} is missing")
        typed(position, "finished", bool)
        for name in ("objects", "unfinished"):
            if not all(isinstance(each, str) for each in typed(position, name, list) or ()):
                raise ContractError(f"{name} must hold texts")
    except ContractError as error:
        raise ContractError(f"{PROGRESS}: {error}") from None
    return position
