"""Weights in several files: an index names the file of each tensor."""

from __future__ import annotations

from pathlib import Path

from trainer_hook.contract import ContractError
from trainer_hook.contract.typed_json import json_object, typed

_OF_WEIGHTS = (".safetensors.index.json", ".bin.index.json")


def missing_shards(folder: Path) -> list[str]:
    """Return the files that an index of a checkpoint names and that are not there.

    Raises:
        ContractError: The index of weights is malformed. Files of that form under other names are not of this library.
        OSError: It cannot be read.
    """
    missing: set[str] = set()
    for index in folder.glob("*.index.json"):
        try:
            named = shards_of(index.read_bytes(), what=index.name)
        except ContractError:
            if index.name.endswith(_OF_WEIGHTS):
                raise
            continue
        missing |= {name for name in named if not (folder / name).is_file()}
    return sorted(missing)


def shards_of(raw: bytes, *, what: str) -> set[str]:
    """Return the files that an index names. Raises ``ContractError``: it is no index."""
    files = typed(json_object(raw, what=what), "weight_map", dict) or {}
    if not all(isinstance(name, str) for name in files.values()):
        raise ContractError(f"weight_map in {what} must hold names of files")
    return set(files.values())
