"""Which run left which finished checkpoint on a volume: those of another run are neither resumed from nor uploaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.lifecycle import volume_users
from trainer_hook.contract import ContractError, encode_json
from trainer_hook.contract.typed_json import json_object

MOST_RUNS = 16
"""Number of runs that are remembered, the latest ones."""
MOST_VERSIONS = 10_000
"""Checkpoints that are remembered of each."""


@dataclass(frozen=True, slots=True)
class VolumeRun(volume_users.VolumeUser):
    """A run that used the volume."""

    store: str
    """``CKPT_STORE``."""
    name: str | None
    """``CKPT_RUN_ID``, else its job; ``None``: it has none."""


def is_same_run(one: VolumeRun, other: VolumeRun) -> bool:
    """Whether two pods are of one run: they have one prefix, or one name."""
    return one.store == other.store or (one.name is not None and one.name == other.name)


def taken_over(before: Sequence[VolumeRun], me: VolumeRun, present: Collection[str]) -> list[VolumeRun]:
    """Return the runs of a volume once ``me`` uses it, the present one first.

    Args:
        before: The runs until now, the latest first; none: the volume is new, or an earlier version used it.
        me: The present run.
        present: Versions of all finished checkpoints on the volume.
    """
    return volume_users.taken_over(before, me, present, is_same=is_same_run, most=MOST_RUNS)


def encode_runs(runs: Sequence[VolumeRun]) -> bytes:
    """Return the content of ``runs.json``."""
    return encode_json(
        {"runs": [{"store": r.store, "name": r.name, "versions": sorted(r.versions)[:MOST_VERSIONS]} for r in runs]}
    )


def decode_runs(raw: bytes | None) -> list[VolumeRun]:
    """Return the runs of ``runs.json``; none: it is missing or malformed."""
    try:
        said = json_object(raw or b"{}", what="runs.json").get("runs")
    except ContractError:
        return []
    return [run for each in said[:MOST_RUNS] if (run := _run(each)) is not None] if isinstance(said, list) else []


def _run(fields: Any) -> VolumeRun | None:
    if not isinstance(fields, Mapping) or not isinstance(fields.get("store"), str):
        return None
    name, versions = fields.get("name"), fields.get("versions")
    known = versions if isinstance(versions, list) else []
    own_name = name if isinstance(name, str) else None
    return VolumeRun(fields["store"], own_name, versions=frozenset(v for v in known if isinstance(v, str)))
