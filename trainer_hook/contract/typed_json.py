"""JSON, one field at a time. Every reader raises ``ContractError`` for a wrong value; its text names the field and the reason.

An absent field reads as ``None``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from trainer_hook.contract.names import FORMAT, ContractError, LaterFormatError


def rfc3339(epoch_s: float) -> str:
    """Return a time as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(epoch_s, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch_seconds(timestamp: str) -> float:
    """Return the epoch seconds of an RFC 3339 timestamp with a time zone."""
    if not (timestamp.isascii() and timestamp.isprintable()):  # Python takes any character between date and time
        raise ContractError(f"{timestamp[:60]!r} is not an RFC 3339 timestamp")
    try:
        moment = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    except ValueError:
        raise ContractError(f"{timestamp[:60]!r} is not an RFC 3339 timestamp") from None
    if moment.tzinfo is None:
        raise ContractError(f"{timestamp[:60]!r} has no time zone")
    if not 1 < moment.year < 9999:  # at both ends the conversion to UTC may overflow
        raise ContractError(f"{timestamp[:60]!r} is not a time of this calendar")
    return moment.timestamp()


def encode_json(fields: Mapping[str, Any]) -> bytes:
    """Return one line of JSON with the fields that are not ``None``."""
    kept = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(kept, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def json_object(raw: bytes, *, what: str) -> dict[str, Any]:
    """Return a JSON object, in which no object has a key twice. ``what`` names it in the error."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
        if b"\\u" in raw:  # may escape half a surrogate pair, which nothing could write again
            json.dumps(value, ensure_ascii=False).encode()
    except _RepeatedKeyError as error:
        raise ContractError(f"{what} has {error}") from None
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ContractError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def ambiguity(raw: bytes) -> str | None:
    """Return why parsers differ about a JSON document that one has taken, as text for an error; ``None``: they do not.

    An object has a key twice, an integer has thousands of digits, or arrays are nested too deeply. Nothing is built of the
    document, so this costs little.
    """
    try:
        json.loads(raw, object_pairs_hook=_checked)
    except (ValueError, RecursionError) as error:
        return str(error)[:200]
    return None


class _RepeatedKeyError(ValueError):
    """Text: which key is there twice."""


def _checked(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(f"the key {next(key for key in keys if keys.count(key) > 1)[:60]!r} twice in one object")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _checked(pairs)
    return found


def expect_format(fields: Mapping[str, Any]) -> None:
    """Refuse a later version of the format."""
    version = integer(fields, "format", least=1)
    if version not in (None, FORMAT):
        raise LaterFormatError(version)


def typed(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of a type."""
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise ContractError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def integer(fields: Mapping[str, Any], name: str, *, least: int = 0) -> int | None:
    """Return an integer from ``least`` on."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 63:
        raise ContractError(f"{name} must be an integer from {least} on, not {str(value)[:60]!r}")
    return value


def seconds(fields: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number of seconds, 0 or more."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not (0 <= value < 1 << 63 and float(value) < 1 << 63):
        raise ContractError(f"{name} must be a number of seconds, not {str(value)[:60]!r}")
    return float(value)


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not (abs(value) < 1e300 and abs(float(value)) < 1e300):
        raise ContractError(f"{name} must be a finite number, not {str(value)[:60]!r}")
    return float(value)


def timestamp(fields: Mapping[str, Any], name: str) -> str | None:
    """Return an RFC 3339 timestamp as it is written."""
    value: str | None = typed(fields, name, str)
    if value is not None:
        epoch_seconds(value)
    return value


def one_of(fields: Mapping[str, Any], name: str, allowed: frozenset[str]) -> str | None:
    """Return one of the allowed words."""
    value: str | None = typed(fields, name, str)
    if value is not None and value not in allowed:
        raise ContractError(f"{name} is {value[:60]!r}, must be one of {', '.join(sorted(allowed))}")
    return value
