"""What may be believed of a journal's lines."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.journal import MAX_LINE_BYTES, Begun, FileChange, FileStored, Line, PartSent, decode_line, encode_line
from sidecar.core.format.manifest import FileEntry
from trainer_hook.contract import ContractError

NAME = "checkpoint-20"
BEGUN = {"event": "begun", "path": "model", "stamp": "s", "upload_id": "u", "key": "checkpoint-20/model", "part_bytes": 5}
PART = {"event": "part", "path": "model", "number": 1, "size_bytes": 5, "etag": "e", "crc": 3}
ENTRY = {"path": "model", "key": "checkpoint-20/model", "size_bytes": 5, "crc64nvme": "0" * 16}
STORED = {"event": "stored", "stamp": "s", "first_crc": None, "entry": ENTRY}


def decode(said: Any) -> Line:
    return decode_line(json.dumps(said).encode(), name=NAME)


@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: repr(v).encode()))
def test_any_bytes_are_a_line_or_refused(raw: bytes) -> None:
    with suppress(ContractError):
        decode_line(raw, name=NAME)


@given(st.sampled_from([BEGUN, PART, STORED]), st.sampled_from(sorted(BEGUN | PART | STORED | ENTRY)), st.from_type(object))
def test_any_value_in_a_field_is_taken_or_refused(line: dict[str, Any], field: str, value: object) -> None:
    try:
        changed = json.dumps(line | {field: value})
    except (TypeError, ValueError):
        return
    try:
        decoded = decode_line(changed.encode(), name=NAME)
    except ContractError:
        return
    key = decoded.key if isinstance(decoded, Begun) else decoded.entry.key if isinstance(decoded, FileStored) else NAME
    assert key.startswith(NAME)


@pytest.mark.parametrize("said", [BEGUN, PART, STORED, {"event": "dropped", "path": "model"}])
def test_what_is_written_is_read_again(said: dict[str, Any]) -> None:
    assert decode_line(encode_line(decode(said)), name=NAME) == decode(said)


FOREIGN = [
    "checkpoint-10/model",
    "checkpoint-20/.complete",
    "checkpoint-20/other",
    "checkpoint-20/.ckpt/a/node-00000-of-00001.json",
    "checkpoint-20/.ckpt/a/b/node-00001/model",
    "checkpoint-20/.ckpt/../node-00001/model",
    "checkpoint-20/.ckpt/a/node-1/model",
    "checkpoint-20/../checkpoint-10/model",
    "run.json",
    "",
]


@pytest.mark.parametrize("key", FOREIGN)
def test_no_other_object_is_believed_to_be_this_file(key: str) -> None:
    with pytest.raises(ContractError, match="no object of 'model' in checkpoint-20"):
        decode(BEGUN | {"key": key})
    with pytest.raises(ContractError, match="no object of 'model' in checkpoint-20"):
        decode(STORED | {"entry": ENTRY | {"key": key}})


@pytest.mark.parametrize("path", [".complete", ".ckpt/a/node-00000-of-00001.json", "../x", "/x", "a\nb"])
def test_no_path_of_the_system_is_a_file(path: str) -> None:
    with pytest.raises(ContractError):
        decode(STORED | {"entry": ENTRY | {"path": path, "key": f"{NAME}/{path}"}})


def test_a_file_whose_name_another_node_uses_lies_in_the_folder_of_its_node() -> None:
    line = decode(BEGUN | {"path": "a/model", "key": "checkpoint-20/.ckpt/20260301T120000Z-x/node-00007/a/model"})
    assert isinstance(line, Begun)


@pytest.mark.parametrize(
    "said",
    [
        PART | {"number": 0},
        PART | {"number": 10_001},
        PART | {"number": True},
        PART | {"number": "1"},
        PART | {"size_bytes": -1},
        PART | {"size_bytes": 1 << 60},
        PART | {"crc": 1 << 64},
        PART | {"etag": "x" * 300},
        BEGUN | {"part_bytes": 0},
        BEGUN | {"upload_id": ""},
        BEGUN | {"upload_id": "a b"},
        BEGUN | {"upload_id": "x" * 3000},
        STORED | {"entry": ENTRY | {"size_bytes": 1 << 60}},
        {"event": "nothing"},
        [],
    ],
)
def test_wrong_types_and_sizes_are_refused(said: Any) -> None:
    with pytest.raises(ContractError):
        decode(said)


@pytest.mark.parametrize(
    "said",
    [
        BEGUN | {"stamp": "s" * 128},
        BEGUN | {"upload_id": "u" * 2048},
        BEGUN | {"part_bytes": 1},
        PART | {"number": 10_000, "etag": "e" * 256},
        PART | {"size_bytes": 0, "crc": 0},
        PART | {"size_bytes": 1 << 50, "crc": (1 << 64) - 1},
        STORED | {"first_crc": 0, "entry": ENTRY | {"size_bytes": 1 << 50, "part_bytes": 1 << 50, "etag": "e" * 256}},
    ],
)
def test_a_value_at_its_limit_is_taken(said: Any) -> None:
    decode(said)


@pytest.mark.parametrize(
    "said",
    [
        BEGUN | {"stamp": "s" * 129},
        BEGUN | {"upload_id": "u" * 2049},
        BEGUN | {"part_bytes": (1 << 50) + 1},
        PART | {"etag": "e" * 257},
        PART | {"size_bytes": (1 << 50) + 1},
        STORED | {"entry": ENTRY | {"size_bytes": (1 << 50) + 1}},
        STORED | {"entry": ENTRY | {"part_bytes": (1 << 50) + 1}},
        STORED | {"entry": ENTRY | {"etag": "e" * 257}},
    ],
)
def test_a_value_beyond_its_limit_is_refused(said: Any) -> None:
    with pytest.raises(ContractError):
        decode(said)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (PART | {"number": 0}, "part.number: Input should be greater than or equal to 1"),
        (STORED | {"entry": ENTRY | {"size_bytes": -1}}, "stored.entry.size_bytes: Input should be greater than or equal to 0"),
        ([], "line: Input should be an object"),
    ],
)
def test_the_wrong_field_is_named(said: Any, why: str) -> None:
    with pytest.raises(ContractError) as refused:
        decode(said)
    assert str(refused.value) == why


def test_a_line_with_a_key_twice_is_refused() -> None:
    raw = json.dumps(STORED).encode()
    assert isinstance(decode_line(raw, name=NAME), FileStored)
    with pytest.raises(ContractError, match="the key 'size_bytes' twice"):
        decode_line(raw.replace(b'"size_bytes": 5', b'"size_bytes": 6, "size_bytes": 5'), name=NAME)
    for later in (b"9" * 5000, b"[" * 3000 + b"]" * 3000):
        with pytest.raises(ContractError):
            decode_line(raw[:-1] + b', "later": ' + later + b"}", name=NAME)


def test_a_line_is_no_longer_than_any_that_is_written() -> None:
    path = "d/" * 400 + "x"
    longest = FileStored(
        stamp="s" * 128, first_crc=1 << 63, entry=FileEntry.model_validate(ENTRY | {"path": path, "key": path})
    )
    assert len(encode_line(longest)) < MAX_LINE_BYTES
    raw = json.dumps(PART).encode()
    assert isinstance(decode_line(raw.rjust(MAX_LINE_BYTES), name=NAME), PartSent)
    with pytest.raises(ContractError, match="longer than"):
        decode_line(raw.rjust(MAX_LINE_BYTES + 1), name=NAME)


def test_lines_without_a_key_speak_of_known_files_only() -> None:
    assert isinstance(decode(PART), PartSent)
    assert isinstance(decode({"event": "unconfirmed", "path": "model"}), FileChange)
