"""A node's manifest."""

from __future__ import annotations

from sidecar.core.format.manifest import decode_manifest, encode
from tests.fuzz.target import check_text
from trainer_hook.contract import ContractError

INSTRUMENTED = ("sidecar.core.format", "trainer_hook.contract")
IS_JSON = True
KEY = "checkpoint-20/.ckpt/a1/node-00000-of-00001.json"


def check(raw: bytes) -> None:
    try:
        manifest = decode_manifest(raw, key=KEY)
    except ContractError as error:
        check_text(error, names=KEY)
        return
    assert decode_manifest(encode(manifest), key=KEY) == manifest
