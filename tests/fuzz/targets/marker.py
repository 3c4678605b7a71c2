"""``.complete`` on the volume."""

from __future__ import annotations

from tests.fuzz.target import check_text
from trainer_hook.contract import ContractError, encode_marker, parse_marker

INSTRUMENTED = ("trainer_hook.contract",)
IS_JSON = True
NAME = "checkpoint-20"


def check(raw: bytes) -> None:
    try:
        marker = parse_marker(raw, name=NAME)
    except ContractError as error:
        check_text(error)
        return
    assert parse_marker(encode_marker(marker), name=NAME) == marker
