from __future__ import annotations

import json
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.spot import SpotNotice, aws_action, aws_rebalance, azure_preempt, gcp_preempted
from tests import strategies
from trainer_hook.contract import epoch_seconds, rfc3339

NOW_S = epoch_seconds("2026-11-21T12:00:00Z")
EVENT: dict[str, Any] = {
    "EventId": "f020ba2e",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["train_0"],
    "EventStatus": "Scheduled",
    "NotBefore": "Sat, 21 Nov 2026 12:00:45 GMT",
}


def azure(*events: dict[str, Any]) -> bytes:
    return json.dumps({"DocumentIncarnation": 1, "Events": events}).encode()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_says_what_will_be_done_and_when(action: str) -> None:
    said = aws_action(json.dumps({"action": action, "time": "2026-11-21T12:01:30Z"}).encode(), now_s=NOW_S)
    assert said is not None
    assert said.ends_in_s == 90


@given(st.floats(-1e4, 1e4).filter(lambda s: abs(s) > 0.01))
def test_a_time_that_cannot_be_is_that_of_a_wrong_clock(in_s: float) -> None:
    """A notice that is over would be void at once, and one far ahead would be planned with."""
    said = aws_action(json.dumps({"action": "stop", "time": rfc3339(NOW_S + in_s)}).encode(), now_s=NOW_S)
    assert said is not None
    assert said.ends_in_s == pytest.approx(in_s if 0 < in_s < 120 else 120, abs=1e-3)
    noted = EVENT | {"NotBefore": formatdate(NOW_S + round(in_s), usegmt=True)}
    said = azure_preempt(azure(noted), machine="train_0", now_s=NOW_S)
    assert said is not None
    assert said.ends_in_s == (round(in_s) if round(in_s) > 0 else 30)


def test_a_notice_without_a_time_has_that_of_its_cloud() -> None:
    assert aws_action(b'{"action": "terminate"}', now_s=NOW_S).ends_in_s == 120  # type: ignore[union-attr]
    assert azure_preempt(azure(EVENT | {"NotBefore": ""}), machine="train_0", now_s=NOW_S).ends_in_s == 30  # type: ignore[union-attr]
    assert gcp_preempted(b"TRUE\n") == SpotNotice("gcp", 30.0)


def test_a_rebalance_recommendation_says_when_it_was_given() -> None:
    assert aws_rebalance(b'{"noticeTime": "2026-11-21T11:00:00Z"}') == "2026-11-21T11:00:00Z"


def test_azure_names_the_machine_and_the_kind_of_event() -> None:
    said = azure_preempt(azure(EVENT), machine="train_0", now_s=NOW_S)
    assert said is not None
    assert said.ends_in_s == 45
    assert azure_preempt(azure(EVENT), machine="train_1", now_s=NOW_S) is None
    assert azure_preempt(azure(EVENT | {"EventType": "Freeze"}), machine="train_0", now_s=NOW_S) is None
    assert azure_preempt(azure(), machine="train_0", now_s=NOW_S) is None
    others = [EVENT | {"EventType": "Reboot"}, EVENT | {"Resources": ["train_7"]}, EVENT]
    assert azure_preempt(azure(*others), machine="train_0", now_s=NOW_S) == said


documents = strategies.hostile(st.sampled_from([b'{"action": "terminate", "time": "x"}', azure(EVENT), b"TRUE", b"FALSE"]))


@given(documents | st.binary(max_size=200))
def test_any_bytes_are_a_notice_or_none(raw: bytes) -> None:
    for said in (aws_action(raw, now_s=NOW_S), gcp_preempted(raw), azure_preempt(raw, machine="", now_s=NOW_S)):
        assert said is None or said.ends_in_s >= 0
    assert aws_rebalance(raw) is None or isinstance(aws_rebalance(raw), str)


@pytest.mark.parametrize(
    "raw", [b"", b"FALSE", b"<html>", b"404 - Not Found", b"[]", b'{"Events": 3}', b'{"Events": [3]}', b"[" * 100_000]
)
def test_what_others_answer_at_that_address_is_no_notice(raw: bytes) -> None:
    assert aws_action(raw, now_s=NOW_S) is None
    assert gcp_preempted(raw) is None
    assert azure_preempt(raw, machine="", now_s=NOW_S) is None
    assert aws_rebalance(raw) is None


@pytest.mark.parametrize("at", ["2026-11-21T12:00:45", "not a time", 45, None])
def test_a_time_without_a_zone_is_utc_and_one_that_cannot_be_read_is_unknown(at: Any) -> None:
    said = aws_action(json.dumps({"action": "stop", "time": at}).encode(), now_s=NOW_S)
    assert said is not None
    assert said.ends_in_s == (45 if at == "2026-11-21T12:00:45" else 120)


def test_a_time_in_another_zone_is_the_same_instant_and_one_that_is_now_is_of_a_wrong_clock() -> None:
    for at, in_s in (("2026-11-21T13:01:30+01:00", 90), ("2026-11-21T12:00:00Z", 120)):
        said = aws_action(json.dumps({"action": "stop", "time": at}).encode(), now_s=NOW_S)
        assert said == SpotNotice(f"aws {at}", in_s)


@pytest.mark.parametrize("at", ["no date", "Sat, 99 Nov 2026 12:00:45 GMT", "", 45, None])
def test_a_date_of_azure_that_cannot_be_read_is_unknown(at: Any) -> None:
    said = azure_preempt(azure({**EVENT, "NotBefore": at}), machine="train_0", now_s=NOW_S)
    assert said is not None
    assert said.ends_in_s == 30
