"""A line of the upload journal, which the trainer may be able to write."""

from __future__ import annotations

from sidecar.core.format.journal import decode_line, encode_line
from tests.fuzz.target import check_text
from trainer_hook.contract import ContractError

INSTRUMENTED = ("sidecar.core.format", "trainer_hook.contract")
IS_JSON = True
NAME = "checkpoint-20"


def check(raw: bytes) -> None:
    try:
        line = decode_line(raw, name=NAME)
    except ContractError as error:
        check_text(error)
        return
    assert decode_line(encode_line(line), name=NAME) == line
