"""The small files of the volume and of the state directory, and the notices of the clouds: each input is read as every one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from sidecar.core.lifecycle.spot import aws_action, aws_rebalance, azure_preempt, gcp_preempted
from sidecar.download.quarantine import decode_cache
from sidecar.lifecycle.pod import end_of
from sidecar.lifecycle.pod_record import decode_record
from tests.fuzz.target import check_text
from trainer_hook.contract import (
    ContractError,
    encode_answer,
    encode_notice,
    encode_request,
    encode_trainer_state,
    parse_answer,
    parse_notice,
    parse_request,
    parse_trainer_state,
)

INSTRUMENTED = (
    "sidecar.core.lifecycle.spot",
    "sidecar.download.quarantine",
    "sidecar.lifecycle.pod_record",
    "trainer_hook.contract",
)
IS_JSON = True
POD = "pod-1"
NOW_S = 1_772_366_400.0
FILES: tuple[tuple[Callable[[bytes], Any], Callable[[Any], bytes]], ...] = (
    (parse_trainer_state, encode_trainer_state),
    (parse_request, encode_request),
    (parse_answer, encode_answer),
    (parse_notice, encode_notice),
)


def check(raw: bytes) -> None:
    for parse, to_bytes in FILES:
        try:
            value = parse(raw)
        except ContractError as error:
            check_text(error)
            continue
        assert parse(to_bytes(value)) == value
    record = decode_record(raw, POD)
    assert record is None or (math.isfinite(record.since_s) and record.booted_s >= 0)
    ended_s, _ = end_of(raw)
    assert ended_s is None or math.isfinite(ended_s)
    for name, entry in decode_cache(raw).items():
        json.dumps([name, entry.crc, entry.reason], ensure_ascii=False).encode()  # the API answers with it
    for notice in (aws_action(raw, now_s=NOW_S), gcp_preempted(raw), azure_preempt(raw, machine="", now_s=NOW_S)):
        assert notice is None or 0 < notice.ends_in_s < math.inf
    aws_rebalance(raw)
