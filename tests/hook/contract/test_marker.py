from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import strategies
from tests.outcome import outcome
from trainer_hook.contract import (
    MAX_MARKER_BYTES,
    META_PARTIAL,
    META_RESTORED,
    REASONS,
    ContractError,
    ListedFile,
    Marker,
    Node,
    encode_marker,
    is_script_owned,
    parse_marker,
    train_call_of,
    version_of,
)
from trainer_hook.contract.names import MAX_META_BYTES, MAX_META_DEPTH, MAX_NODES

NAME = "checkpoint-20"


def parse(text: str | bytes, *, name: str = NAME) -> Marker:
    return parse_marker(text.encode() if isinstance(text, str) else text, name=name)


def refusal(fields: dict[str, Any] | str, *, name: str = NAME) -> str:
    with pytest.raises(ContractError) as refused:
        parse(fields if isinstance(fields, str) else json.dumps(fields), name=name)
    return str(refused.value)


@given(strategies.hostile(strategies.markers().map(encode_marker)), strategies.names)
def test_any_bytes_are_a_marker_or_a_contract_error(raw: bytes, name: str) -> None:
    marker = outcome(parse_marker, raw, name=name)
    if not isinstance(marker, ContractError):
        # Whatever was accepted can be written and read again, here and in the documents of the store.
        assert parse_marker(encode_marker(marker), name=name) == marker


@given(strategies.markers())
def test_a_marker_that_is_written_reads_as_itself(marker: Marker) -> None:
    name = "final" if marker.step is None else f"checkpoint-{marker.step}"
    assert parse_marker(encode_marker(marker), name=name) == marker


@given(strategies.markers(), st.sampled_from(["", " ", "\n\t"]))
def test_a_marker_is_one_line_of_strict_json(marker: Marker, space: str) -> None:
    raw = encode_marker(marker)
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") == 1
    assert json.loads(raw, parse_constant=pytest.fail)["format"] == 1
    assert parse(raw + space.encode(), name="final") == parse(raw, name="final")


@given(strategies.steps, strategies.steps)
def test_the_step_must_be_the_one_in_the_name(step: int, named: int) -> None:
    raw = json.dumps({"step": step}).encode()
    if step == named:
        assert parse_marker(raw, name=f"checkpoint-{named}").step == step
    else:
        with pytest.raises(ContractError, match=f"step {step}"):
            parse_marker(raw, name=f"checkpoint-{named}")


@pytest.mark.parametrize("content", [b"", b" ", b"\n", b"\r\n\t "])
def test_an_empty_marker_says_nothing_and_is_valid(content: bytes) -> None:
    assert parse(content) == Marker()


def test_an_empty_object_says_nothing_and_is_valid() -> None:
    assert parse("{}") == Marker()


def test_unknown_fields_are_ignored() -> None:
    assert parse('{"step": 20, "written_by": "a shell script"}') == Marker(step=20)


def test_null_counts_as_not_said() -> None:
    said = dict.fromkeys(["step", "reason", "created_at", "attempt", "node", "world_size", "files", "meta", "format"])
    assert parse(json.dumps(said)) == Marker()


def test_final_may_have_any_step() -> None:
    assert parse('{"step": 12345}', name="final").step == 12345


def test_a_full_marker_is_read_field_by_field() -> None:
    marker = parse(
        """{"format": 1, "step": 20, "reason": "jit", "created_at": "2026-03-01T10:00:00Z", "attempt": "a-1",
        "node": {"index": 1, "count": 2}, "world_size": 16, "global_step_seconds": 2,
        "files": [{"path": "a/b.pt", "size_bytes": 7}], "meta": {"owner": "script"}}"""
    )
    assert marker == Marker(
        step=20,
        reason="jit",
        created_at="2026-03-01T10:00:00Z",
        attempt="a-1",
        node=Node(1, 2),
        world_size=16,
        global_step_seconds=2.0,
        files=(ListedFile("a/b.pt", 7),),
        meta={"owner": "script"},
    )
    assert isinstance(marker.global_step_seconds, float)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"\0", "not JSON"),
        ("[]", "JSON object, not list"),
        ("20", "JSON object, not int"),
        ("null", "JSON object, not NoneType"),
        ("[" * 100_000, "not JSON"),
        ('{"step": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_what_is_not_a_json_object_is_refused(content: str | bytes, reason: str) -> None:
    with pytest.raises(ContractError, match=reason):
        parse(content)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('{"step": 20, "step": 20}', "step"),
        ('{"attempt": "a", "\\u0061ttempt": "b"}', "attempt"),
        ('{"node": {"index": 0, "count": 2, "index": 1}}', "index"),
        ('{"meta": {"a": [{"b": 1, "b": 2}]}}', "b"),
        ('{"unknown": {"x": 1, "x": 2}}', "x"),
    ],
)
def test_a_key_that_is_there_twice_is_refused_because_readers_differ_in_which_they_take(content: str, key: str) -> None:
    with pytest.raises(ContractError, match=f"marker has the key '{key}' twice in one object"):
        parse(content)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"step": "20"}, "step"),
        ({"step": 20.0}, "step"),
        ({"step": True}, "step"),
        ({"step": -1}, "step"),
        ({"step": 2**63}, "step"),
        ({"reason": "because"}, "reason"),
        ({"reason": 1}, "reason"),
        ({"created_at": 1700000000}, "created_at"),
        ({"created_at": "yesterday"}, "yesterday"),
        ({"created_at": "2026-03-01T10:00:00"}, "time zone"),
        ({"attempt": 3}, "attempt"),
        ({"attempt": "../up"}, "attempt"),
        ({"attempt": ""}, "attempt"),
        ({"attempt": "a" * 129}, "attempt"),
        ({"node": 0}, "node"),
        ({"node": {}}, "index and count"),
        ({"node": {"index": 0}}, "index and count"),
        ({"node": {"index": 2, "count": 2}}, "node 2 of 2"),
        ({"node": {"index": 0, "count": 0}}, "count"),
        ({"node": {"index": 0, "count": MAX_NODES + 1}}, "count"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": []}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"global_step_seconds": -0.5}, "global_step_seconds"),
        ({"global_step_seconds": "2"}, "global_step_seconds"),
        ({"global_step_seconds": False}, "global_step_seconds"),
        ({"global_step_seconds": 10**400}, "global_step_seconds"),
        ({"global_step_seconds": float("nan")}, "global_step_seconds"),
        ({"global_step_seconds": float("inf")}, "global_step_seconds"),
        ({"files": {}}, "files"),
        ({"files": ["a"]}, "files"),
        ({"files": [{"path": "a"}]}, "path and size_bytes"),
        ({"files": [{"size_bytes": 1}]}, "path and size_bytes"),
        ({"files": [{"path": "a", "size_bytes": -1}]}, "size_bytes"),
        ({"files": [{"path": "/etc/passwd", "size_bytes": 1}]}, "/etc/passwd"),
        ({"files": [{"path": "../x", "size_bytes": 1}]}, "../x"),
        ({"files": [{"path": ".complete", "size_bytes": 1}]}, "reserved"),
        ({"files": [{"path": "a", "size_bytes": 1}] * 2}, "twice"),
        ({"meta": []}, "meta"),
        ({"format": 2}, "format 2 is newer"),
        ({"format": 0}, "format"),
        ({"format": "1"}, "format"),
    ],
)
def test_a_field_of_another_type_or_range_is_named_in_the_refusal(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(fields)


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_every_reason_of_the_contract_is_read(reason: str) -> None:
    assert parse(json.dumps({"reason": reason})).reason == reason


def test_a_marker_of_one_mebibyte_is_read_and_one_byte_more_is_not() -> None:
    largest = b"{}".ljust(MAX_MARKER_BYTES)
    assert parse(largest) == Marker()
    with pytest.raises(ContractError, match="larger"):
        parse(largest + b" ")


def test_meta_of_64_kibibytes_is_read_and_one_byte_more_is_not() -> None:
    largest = {"a": "x" * (MAX_META_BYTES - len('{"a": ""}'))}
    assert parse(json.dumps({"meta": largest})).meta == largest
    assert "meta" in refusal({"meta": {"a": largest["a"] + "x"}})
    downloaded = largest | {META_RESTORED: "0123456789abcdef", META_PARTIAL: 99_999}
    assert parse(json.dumps({"meta": downloaded})).meta == downloaded
    assert "meta" in refusal({"meta": largest | {META_RESTORED: "x" * 200}})


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels - 1):
        value = [value]
    return {"a": value}


def test_meta_may_not_be_nested_deeper_than_the_documents_of_the_store_can_be_read() -> None:
    assert parse(json.dumps({"meta": nested(MAX_META_DEPTH)})).meta == nested(MAX_META_DEPTH)
    assert "nested" in refusal({"meta": nested(MAX_META_DEPTH + 1)})
    assert "nested" in refusal({"meta": nested(900)})


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_meta_that_could_not_be_written_again_is_refused(value: str) -> None:
    assert "meta" in refusal('{"meta": {"a": ' + value + "}}")


@pytest.mark.parametrize("field", [r'"meta": {"a": "\ud800"}', r'"meta": {"\udfff": 1}', r'"unknown": "\ud800"'])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(field: str) -> None:
    assert "surrogates" in refusal("{" + field + "}")
    assert parse(r'{"meta": {"a": "\ud83d\udcbe"}}').meta == {"a": "\U0001f4be"}


@pytest.mark.parametrize("separator", ["\\n", "\\u0000", "\\ud800", "é"])
def test_a_time_has_no_other_character_than_a_timestamp(separator: str) -> None:
    assert refusal('{"created_at": "2026-03-01' + separator + '12:00:00Z"}')


@pytest.mark.parametrize("seconds", [(1 << 63) - 1, 1 << 63, 10**400])
def test_a_number_that_is_rounded_beyond_its_limit_is_refused(seconds: int) -> None:
    assert "global_step_seconds" in refusal({"global_step_seconds": seconds})


def test_a_train_call_is_read() -> None:
    assert [train_call_of(meta) for meta in ({}, {"train_call": 0}, {"train_call": 2}, {"train_call": "2"})] == [0, 0, 2, -1]


@pytest.mark.parametrize(("owner", "is_script"), [("script", True), ("hook", False), (None, False)])
def test_a_script_owns_the_checkpoints_that_it_rotates_itself(owner: str | None, is_script: bool) -> None:
    assert is_script_owned({} if owner is None else {"owner": owner}) is is_script


def test_a_marker_that_is_written_again_has_another_version() -> None:
    versions = {
        version_of(inode, size, time_ns) for inode in (1, 2) for size in (0, 2) for time_ns in (0, 1_772_366_400_000_000_000)
    }
    assert len(versions) == 8
