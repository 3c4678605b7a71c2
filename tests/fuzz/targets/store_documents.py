"""The other documents of the store: each input is read as every one of them, and as the key and time of a claim."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from sidecar.core.format.manifest import (
    BegunDeletion,
    ManifestBundle,
    Quarantined,
    decode,
    decode_reupload_request,
    encode,
)
from sidecar.core.lifecycle.fencing import Claim, claims_among, decode_claim, next_claim, seconds_of
from sidecar.core.lifecycle.prefix_ownership import with_attempt
from sidecar.core.lifecycle.run_document import decode_run, encode_run
from tests.fuzz.target import check_text
from trainer_hook.contract import ContractError

INSTRUMENTED = (
    "sidecar.core.format",
    "sidecar.core.lifecycle.run_document",
    "sidecar.core.lifecycle.fencing",
    "trainer_hook.contract",
)
IS_JSON = True
NAME = "checkpoint-20"
DOCUMENTS: tuple[tuple[Callable[..., Any], Callable[..., bytes], dict[str, str]], ...] = (
    (partial(decode, ManifestBundle), encode, {"key": "k"}),
    (partial(decode, Quarantined), encode, {"key": "k"}),
    (partial(decode, BegunDeletion), encode, {"key": "k"}),
    (decode_reupload_request, encode, {"key": "k", "name": NAME}),
    (decode_run, encode_run, {}),
)


def check(raw: bytes) -> None:
    for read, to_bytes, options in DOCUMENTS:
        try:
            document = read(raw, **options)
        except ContractError as error:
            check_text(error)
            continue
        assert read(to_bytes(document), **options) == document
    claimed = decode_claim(raw)
    assert claimed.age_s is None or 0 <= claimed.age_s < 1 << 63
    with contextlib.suppress(ContractError):
        run = decode_run(raw)
        epoch = next_claim([], "0" * 16, known_epoch=run.epoch).epoch
        assert 0 < epoch < 10**8
        assert decode_run(encode_run(with_attempt(run, "a9"))).attempts[-1] == "a9"
    text = raw.decode("utf-8", errors="surrogateescape")
    seconds_of(text)
    for claim in claims_among([(text, text)]):
        assert Claim(claim.epoch, claim.holder_id).key == text
