"""The commit, and the choice of a resume that follows from it."""

from __future__ import annotations

from sidecar.core.format.manifest import decode_commit, encode
from tests.fuzz.target import check_text
from trainer_hook.contract import ContractError

INSTRUMENTED = ("sidecar.core.format", "trainer_hook.contract")
IS_JSON = True
KEY = "checkpoint-20/.complete"


def check(raw: bytes) -> None:
    try:
        commit = decode_commit(raw, key=KEY)
    except ContractError as error:
        check_text(error, names=KEY)
        return
    assert decode_commit(encode(commit), key=KEY) == commit
