"""trainer.json, request.json, answer.json and terminating."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from tests.outcome import outcome
from trainer_hook.contract import (
    AnswerFile,
    ContractError,
    Notice,
    RequestFile,
    TrainerState,
    encode_answer,
    encode_notice,
    encode_request,
    encode_trainer_state,
    epoch_seconds,
    parse_answer,
    parse_notice,
    parse_request,
    parse_trainer_state,
)
from trainer_hook.contract.names import ACTIONS, NOTICE_SOURCES

requests = st.builds(RequestFile, id=st.text(st.characters(codec="utf-8"), min_size=1), action=st.sampled_from(sorted(ACTIONS)))
identifiers = st.text(st.characters(codec="utf-8"), min_size=1)
answers = st.builds(
    AnswerFile,
    identifiers,
    st.just("saved"),
    strategies.names,
    reason=st.none() | identifiers,
    at=st.none() | strategies.timestamps,
) | st.builds(AnswerFile, identifiers, st.just("failed"), reason=st.none() | identifiers)
notices = st.builds(Notice, at=st.none() | strategies.timestamps, source=st.none() | st.sampled_from(sorted(NOTICE_SOURCES)))


@given(strategies.trainer_states)
def test_a_trainer_state_that_is_written_reads_as_itself(state: TrainerState) -> None:
    assert parse_trainer_state(encode_trainer_state(state)) == state


def test_a_trainer_that_ended_before_it_had_an_attempt_has_none() -> None:
    assert parse_trainer_state(b'{"state": "failed", "attempt": ""}') == TrainerState(state="failed")


def test_a_trainer_state_of_an_attempt_that_is_no_id_is_refused() -> None:
    assert isinstance(outcome(parse_trainer_state, b'{"state": "running", "attempt": "\\ud800"}'), ContractError)


@given(requests)
def test_a_request_that_is_written_reads_as_itself(request: RequestFile) -> None:
    assert parse_request(encode_request(request)) == request


@given(answers)
def test_an_answer_that_is_written_reads_as_itself(answer: AnswerFile) -> None:
    assert parse_answer(encode_answer(answer)) == answer


@given(strategies.hostile(answers.map(encode_answer)))
def test_any_bytes_are_an_answer_or_a_contract_error(raw: bytes) -> None:
    answer = outcome(parse_answer, raw)
    if not isinstance(answer, ContractError):
        assert answer.id
        assert answer.outcome == "failed" or answer.checkpoint is not None


@given(notices)
def test_a_notice_that_is_written_reads_as_itself(notice: Notice) -> None:
    assert parse_notice(encode_notice(notice)) == notice


@given(strategies.hostile(strategies.trainer_states.map(encode_trainer_state)))
def test_any_bytes_are_a_trainer_state_or_a_contract_error(raw: bytes) -> None:
    state = outcome(parse_trainer_state, raw)
    if not isinstance(state, ContractError):
        assert state.state in {"running", "preempted", "succeeded", "failed"}


@given(strategies.hostile(requests.map(encode_request)))
def test_any_bytes_are_a_request_or_a_contract_error(raw: bytes) -> None:
    request = outcome(parse_request, raw)
    if not isinstance(request, ContractError):
        assert request.id
        assert request.action in {"save", "save-and-stop"}


@given(strategies.hostile(notices.map(encode_notice)))
def test_any_bytes_in_terminating_are_a_notice(raw: bytes) -> None:
    notice = parse_notice(raw)
    assert notice.source is None or notice.source in NOTICE_SOURCES
    if notice.at is not None:
        epoch_seconds(notice.at)


@pytest.mark.parametrize(
    "raw", [b"", b"\n", b"now", b"[]", b"{}", b'{"at": "soon"}', b'{"source": "astrologer"}', b"[" * 100_000]
)
def test_a_notice_whose_content_cannot_be_read_is_still_a_notice(raw: bytes) -> None:
    assert parse_notice(raw) == Notice()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not JSON"),
        (b"{}", "no state"),
        (b'{"state": null}', "no state"),
        (b'{"state": "sleeping"}', "sleeping"),
        (b'{"state": "running", "step": -1}', "step"),
        (b'{"state": "running", "pid": "7"}', "pid"),
        (b'{"state": "running", "world_size": 0}', "world_size"),
        (b'{"state": "running", "updated_at": "today"}', "today"),
        (b'{"state": "running", "attempt": 1}', "attempt"),
        (b'{"state": "running", "total_steps": -1}', "total_steps"),
        (b'{"state": "running", "loss": NaN}', "loss"),
        (b'{"state": "running", "loss": 1e999}', "loss"),
        (b'{"state": "running", "loss": "low"}', "loss"),
    ],
)
def test_a_trainer_state_that_is_half_written_or_wrong_is_refused_with_the_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        parse_trainer_state(raw)


@pytest.mark.parametrize(
    "raw",
    [b"{}", b'{"id": "1"}', b'{"action": "save"}', b'{"id": "", "action": "save"}', b'{"id": 1, "action": "save"}'],
)
def test_a_request_needs_id_and_action(raw: bytes) -> None:
    with pytest.raises(ContractError, match="id"):
        parse_request(raw)


def test_a_request_for_anything_but_a_save_is_refused() -> None:
    with pytest.raises(ContractError, match="must be one of save, save-and-stop"):
        parse_request(b'{"id": "1", "action": "delete"}')
