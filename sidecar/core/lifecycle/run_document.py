"""``run.json``, the document that names the holder of a prefix (FORMAT.md, "In the store")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
    run_id, attempts = _text(fields, "run_id"), typed(fields, "attempts", list) or []
    if run_id is None:
        raise ContractError("run.json has no run_id")
    if not all(isinstance(attempt, str) for attempt in attempts):
        raise ContractError("attempts must be a list of text")
    return Run(
        run_id=run_id,
        job=_text(fields, "job") or None,
        holder=_text(fields, "holder") or None,
        beat=integer(fields, "beat") or 0,
        ending=bool(typed(fields, "ending", bool)),
        attempts=tuple(_encodable("attempts", attempt) for attempt in attempts),
        epoch=integer(fields, "epoch") or 0,
        ends_in_s=seconds(fields, "ends_in_s"),
        beat_s=seconds(fields, "beat_s"),
    )


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    text: str | None = typed(fields, name, str)
    return None if text is None else _encodable(name, text)


def _encodable(name: str, text: str) -> str:
    # JSON may escape half a surrogate pair. The holder could not write the document again.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContractError(f"{name} is not valid UTF-8") from None
    return text
