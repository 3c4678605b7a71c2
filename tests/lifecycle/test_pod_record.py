"""What ``pod.json`` may say, which without a state directory the trainer can write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.lifecycle.pod_record import decode_record

SINCE = "2026-03-01T12:00:00.000Z"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pod": "p"},
        {"pod": "q", "since": SINCE},
        {"pod": "p", "since": 3},
        {"pod": "p", "since": "2026"},
        {"pod": "p", "since": SINCE, "booted_s": 10**400},
    ],
)
def test_a_malformed_record_is_none(fields: dict[str, Any]) -> None:
    assert decode_record(json.dumps(fields).encode(), "p") is None


def test_a_record_with_fields_of_another_type_has_their_defaults() -> None:
    record = decode_record(
        json.dumps({"pod": "p", "since": SINCE, "booted_s": "x", "inherited": 3, "boot_id": []}).encode(), "p"
    )
    assert record is not None
    assert (record.since_s, record.booted_s, record.boot_id, record.inherited) == (1772366400.0, 0.0, "", frozenset())
