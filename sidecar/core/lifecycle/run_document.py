"""``run.json``, the document that names the holder of a prefix (FORMAT.md, "In the store")."""

from __future__ import annotations

import dataclasses

from sidecar.core.lifecycle.fencing import MOST_EPOCH
from sidecar.core.lifecycle.prefix_ownership import Run
from trainer_hook.contract import FORMAT, ContractError, encode_json
from trainer_hook.contract.typed_json import expect_format, integer, json_object, seconds, typed

_DEFAULTS = Run("")


def encode_run(run: Run) -> bytes:
    """Return the document; fields that have their default value are left out."""
    given = {each.name: getattr(run, each.name) for each in dataclasses.fields(run)}
    return encode_json({"format": FORMAT} | {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)})


def decode_run(raw: bytes) -> Run:
    """Read the document.

    Raises:
        ContractError: It is not one of format 1; the text names the field.
    """
    fields = json_object(raw, what="run.json")
    expect_format(fields)
    run_id, attempts = typed(fields, "run_id", str), typed(fields, "attempts", list) or []
    if not run_id:
        raise ContractError("run.json has no run_id")
    if not all(isinstance(attempt, str) for attempt in attempts):
        raise ContractError("attempts must be a list of text")
    epoch = integer(fields, "epoch") or 0
    return Run(
        run_id=run_id,
        job=typed(fields, "job", str) or None,
        holder=typed(fields, "holder", str) or None,
        beat=integer(fields, "beat") or 0,
        ending=bool(typed(fields, "ending", bool)),
        attempts=tuple(attempts),
        epoch=epoch if epoch <= MOST_EPOCH else 0,  # its holder writes it again
        ends_in_s=seconds(fields, "ends_in_s"),
        beat_s=seconds(fields, "beat_s"),
    )
