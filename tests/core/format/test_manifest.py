from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format import checksum, keys
from sidecar.core.format import manifest as manifest_module
from sidecar.core.format.manifest import (
    MAX_DOCUMENT_BYTES,
    MAX_FILES,
    MAX_KEY_BYTES,
    MAX_MANIFESTS_BYTES,
    BegunDeletion,
    Commit,
    FileEntry,
    Manifest,
    ManifestBundle,
    Quarantined,
    decode,
    decode_all,
    decode_commit,
    decode_manifest,
    decode_reupload_request,
    encode,
    too_large,
)
from tests import strategies
from tests.outcome import outcome
from trainer_hook.contract import ContractError, LaterFormatError, Marker, SaveIdentity, check_path, encode_marker, parse_marker
from trainer_hook.contract.names import MAX_META_DEPTH, MAX_NODES

KEY = "checkpoint-20/.complete"
MANIFESTS = "checkpoint-20/.ckpt/a1/"

MANIFEST: dict[str, Any] = {
    "format": 1,
    "name": "checkpoint-20",
    "step": 20,
    "attempt": "a1",
    "node": {"index": 0, "count": 1},
    "files": [{"path": "a", "key": "checkpoint-20/a", "size_bytes": 1, "crc64nvme": "0123456789abcdef"}],
}
OTHER_ATTEMPT = "checkpoint-20/.ckpt/a2/node-00000-of-00001.json"
OTHER_STEP = "checkpoint-30/.ckpt/a1/node-00000-of-00001.json"
COMMIT: dict[str, Any] = {
    "format": 1,
    "name": "checkpoint-20",
    "step": 20,
    "attempt": "a1",
    "manifests": [{"key": "checkpoint-20/.ckpt/a1/node-00000-of-00001.json", "size_bytes": 1, "crc64nvme": "0123456789abcdef"}],
}


def manifest_refusal(**changed: Any) -> str:
    with pytest.raises(ContractError) as refused:
        decode_manifest(json.dumps(MANIFEST | changed).encode(), key="the-key")
    return str(refused.value)


def commit_refusal(*, key: str = KEY, **changed: Any) -> str:
    with pytest.raises(ContractError) as refused:
        decode_commit(json.dumps(COMMIT | changed).encode(), key=key)
    return str(refused.value)


@given(strategies.manifests())
def test_a_manifest_that_is_written_reads_as_itself(manifest: Manifest) -> None:
    assert decode_manifest(encode(manifest), key="k") == manifest
    assert encode(decode_manifest(encode(manifest), key="k")) == encode(manifest)


@given(strategies.commits())
def test_a_commit_that_is_written_reads_as_itself(commit: Commit) -> None:
    assert decode_commit(encode(commit), key=keys.commit(commit.name)) == commit
    assert encode(decode_commit(encode(commit), key=keys.commit(commit.name))) == encode(commit)


def reuploads(files: Any) -> bytes:
    return json.dumps({"format": 1, "nodes": {"1": {"etag": "e", "files": files}}}).encode()


def test_a_request_to_upload_again_names_objects_of_its_files_only() -> None:
    files = {"a": "checkpoint-20/a", "d/b": "checkpoint-20/.ckpt/a1/node-00001/d/b"}
    request = decode_reupload_request(reuploads(files), key="k", name="checkpoint-20")
    assert request.nodes["1"].files == files
    assert decode_reupload_request(encode(request), key="k", name="checkpoint-20") == request
    for path, target in [
        ("a", "run.json"),
        ("a", "checkpoint-30/a"),
        ("a", "checkpoint-20/b"),
        ("a", "checkpoint-20/.complete"),
        ("b", "checkpoint-20/.ckpt/a1/node-00001/d/b"),
        ("b", "checkpoint-20/.ckpt/a1/node-0001/b"),
        ("b", "checkpoint-20/.ckpt/../a1/node-00001/b"),
    ]:
        with pytest.raises(ContractError, match="is no object of"):
            decode_reupload_request(reuploads({path: target}), key="k", name="checkpoint-20")
    for malformed in ([], {"a": 1}, {"../a": "checkpoint-20/a"}, None):
        with pytest.raises(ContractError):
            decode_reupload_request(reuploads(malformed), key="k", name="checkpoint-20")


@given(strategies.hostile(strategies.manifests().map(encode)))
def test_any_bytes_are_a_manifest_or_a_contract_error_that_names_the_key(raw: bytes) -> None:
    manifest = outcome(decode_manifest, raw, key="the-key")
    if isinstance(manifest, ContractError):
        assert str(manifest).startswith("the-key: ")
    else:
        assert decode_manifest(encode(manifest), key="the-key") == manifest


@given(strategies.hostile(strategies.commits().map(encode)), strategies.names)
def test_any_bytes_are_a_commit_or_a_contract_error_that_names_the_key(raw: bytes, name: str) -> None:
    commit = outcome(decode_commit, raw, key=keys.commit(name))
    if isinstance(commit, ContractError):
        assert str(commit).startswith(f"{name}/.complete: ")
    else:
        assert commit.name == name


@given(strategies.markers())
def test_the_meta_of_every_valid_marker_survives_the_manifest(marker: Marker) -> None:
    meta = parse_marker(encode_marker(Marker(meta=marker.meta)), name="final").meta
    manifest = decode_manifest(encode(Manifest.model_validate_json(json.dumps(MANIFEST | {"meta": meta}))), key="k")
    assert manifest.meta == meta


def test_the_deepest_meta_of_a_valid_marker_survives_the_manifest() -> None:
    meta: Any = 1
    for _ in range(MAX_META_DEPTH):
        meta = {"a": meta}
    assert parse_marker(json.dumps({"meta": meta}).encode(), name="final").meta == meta
    manifest = Manifest.model_validate_json(json.dumps(MANIFEST | {"meta": meta}))
    assert decode_manifest(encode(manifest), key="k").meta == meta


def test_fields_of_later_versions_are_ignored() -> None:
    later = json.dumps(MANIFEST | {"compression": "none"} | {"files": [MANIFEST["files"][0] | {"mode": 420}]}).encode()
    assert decode_manifest(later, key="k") == decode_manifest(json.dumps(MANIFEST).encode(), key="k")


@pytest.mark.parametrize("files", [MANIFEST["files"], "somewhere else"])
def test_a_document_of_a_later_format_is_told_from_a_malformed_one(files: Any) -> None:
    with pytest.raises(LaterFormatError, match=r"^k: format 7 is newer than this software, which reads 1: update the sidecar$"):
        decode_manifest(json.dumps(MANIFEST | {"format": 7, "files": files}).encode(), key="k")
    for malformed in (0, "2", 2.0):
        with pytest.raises(ContractError) as refused:
            decode_manifest(json.dumps(MANIFEST | {"format": malformed}).encode(), key="k")
        assert not isinstance(refused.value, LaterFormatError)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"format": 2}, "format"),
        ({"format": "1"}, "format"),
        ({"name": "checkpoint-20.tmp"}, "name"),
        ({"name": "../checkpoint-20"}, "name"),
        ({"step": 21}, "step 21"),
        ({"step": "20"}, "step"),
        ({"step": -1}, "step"),
        ({"attempt": "a/../b"}, "attempt"),
        ({"attempt": ""}, "the-key: attempt: Value error, attempt '' must be 1–128 letters, digits, '.', '_' or '-'"),
        ({"save_id": ""}, "the-key: save_id: Value error, save_id '' must be 1–128 letters, digits, '.', '_' or '-'"),
        ({"node": None}, "node"),
        ({"node": {"index": 1, "count": 1}}, "node"),
        ({"node": {"index": -1, "count": 1}}, "node.index"),
        ({"node": {"index": 0, "count": 0}}, "node.count"),
        ({"node": {"index": 0, "count": MAX_NODES + 1}}, "node"),
        ({"files": None}, "files"),
        ({"files": [MANIFEST["files"][0]] * 2}, "twice"),
        (
            {"files": [MANIFEST["files"][0] | {"path": path} for path in ("a", "a/b")]},
            "'a' is a file and the directory of 'a/b'",
        ),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/a//b"}]}, "no plain key"),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/../a"}]}, "no plain key"),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/./a"}]}, "no plain key"),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/a\0b"}]}, "no plain key"),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/a\x7fb"}]}, "no plain key"),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/" + "a" * 1011}]}, "no plain key"),
        ({"files": [MANIFEST["files"][0] | {"key": KEY}]}, "a document and no file"),
        (
            {"files": [MANIFEST["files"][0] | {"key": "checkpoint-20/.ckpt/a1/node-00000-of-00001.json"}]},
            "a document and no file",
        ),
        ({"reason": "urgent"}, "reason is 'urgent'"),
        ({"created_at": "yesterday"}, "not an RFC 3339 timestamp"),
        ({"world_size": 0}, "world_size"),
        ({"meta": {"loss": float("inf")}}, "meta holds what JSON cannot"),
        ({"meta": {"loss": "x" * 70_000}}, "meta is larger than"),
        ({"files": [MANIFEST["files"][0] | {"path": "../a"}]}, "files.0.path"),
        ({"files": [MANIFEST["files"][0] | {"path": ".complete"}]}, "files.0.path"),
        ({"files": [MANIFEST["files"][0] | {"key": "checkpoint-200/a"}]}, "outside checkpoint-20/"),
        ({"files": [MANIFEST["files"][0] | {"key": "run.json"}]}, "outside checkpoint-20/"),
        ({"files": [MANIFEST["files"][0] | {"size_bytes": -1}]}, "files.0.size_bytes"),
        ({"files": [MANIFEST["files"][0] | {"size_bytes": 1.0}]}, "files.0.size_bytes"),
        ({"files": [MANIFEST["files"][0] | {"size_bytes": "1"}]}, "files.0.size_bytes"),
        ({"files": [MANIFEST["files"][0] | {"crc64nvme": "0123456789ABCDEF"}]}, "files.0.crc64nvme"),
        ({"files": [MANIFEST["files"][0] | {"crc64nvme": ""}]}, "files.0.crc64nvme"),
    ],
)
def test_a_manifest_with_a_wrong_field_is_refused_and_the_field_named(changed: dict[str, Any], named: str) -> None:
    assert named in manifest_refusal(**changed)


@pytest.mark.parametrize("path", ["a\x80b", "a\x85b", "\x9b31m", "a\u2028b", " ", "-", "a\\b", "%2e%2e", "é" * 450])
def test_each_path_that_a_trainer_may_write_can_be_read_from_the_manifest(path: str) -> None:
    key = keys.shared_file("checkpoint-20", check_path(path))
    files = [MANIFEST["files"][0] | {"path": path, "key": key}]
    assert decode_manifest(json.dumps(MANIFEST | {"files": files}).encode(), key="k").files[0].path == path


@pytest.mark.parametrize("name", ["name", "attempt", "node", "files"])
def test_a_manifest_without_a_needed_field_is_refused(name: str) -> None:
    raw = json.dumps({key: value for key, value in MANIFEST.items() if key != name}).encode()
    with pytest.raises(ContractError, match=name):
        decode_manifest(raw, key="k")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"format": 2}, "format"),
        ({"epoch": 0}, "epoch: Input should be greater than or equal to 1"),
        ({"reason": "urgent"}, "reason is 'urgent'"),
        ({"name": "checkpoint-30"}, "commit of checkpoint-30"),
        ({"step": 30}, "step 30"),
        ({"manifests": []}, "manifests"),
        ({"manifests": None}, "manifests"),
        (
            {"manifests": [COMMIT["manifests"][0] | {"key": OTHER_ATTEMPT}]},
            "no manifest of attempt a1",
        ),
        ({"manifests": [COMMIT["manifests"][0] | {"key": OTHER_STEP}]}, "no manifest"),
        ({"manifests": [COMMIT["manifests"][0] | {"crc64nvme": 7}]}, "manifests.0.crc64nvme"),
        ({"attempt": "a2"}, "no manifest of attempt a2"),
        ({"manifests": [COMMIT["manifests"][0] | {"key": f"{MANIFESTS}x.json"}]}, "no manifest of attempt a1"),
        ({"manifests": [COMMIT["manifests"][0] | {"key": f"{MANIFESTS}../a1/node-00000-of-00001.json"}]}, "no manifest of"),
        ({"manifests": [COMMIT["manifests"][0] | {"size_bytes": MAX_DOCUMENT_BYTES + 1}]}, "the maximum is 33554432"),
        ({"manifests": [COMMIT["manifests"][0] | {"size_bytes": MAX_DOCUMENT_BYTES}] * 5}, "the maximum is 134217728"),
    ],
)
def test_a_commit_with_a_wrong_field_is_refused_and_the_field_named(changed: dict[str, Any], named: str) -> None:
    assert named in commit_refusal(**changed)


def test_sizes_at_their_limits_are_taken() -> None:
    largest = [COMMIT["manifests"][0] | {"size_bytes": MAX_DOCUMENT_BYTES}] * (MAX_MANIFESTS_BYTES // MAX_DOCUMENT_BYTES)
    commit = decode_commit(json.dumps(COMMIT | {"manifests": largest}).encode(), key=KEY)
    assert too_large(commit, files=MAX_FILES) is None
    assert too_large(commit, files=MAX_FILES + 1) == "it has 400001 files, the maximum is 400000: save fewer and larger files"
    longest = MANIFEST["files"][0] | {"key": "checkpoint-20/".ljust(MAX_KEY_BYTES, "a")}
    assert decode_manifest(json.dumps(MANIFEST | {"files": [longest]}).encode(), key="k").files[0].key == longest["key"]


def test_all_files_of_a_checkpoint_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.dumps(MANIFEST).encode()
    monkeypatch.setattr(manifest_module, "MAX_FILES", 2 * len(MANIFEST["files"]))
    assert len(decode_all([("k", raw)] * 2)) == 2
    with pytest.raises(ContractError, match="k3: with it the checkpoint has 3 files, the maximum is 2"):
        decode_all([("k1", raw), ("k2", raw), ("k3", raw)])


def test_a_document_is_json_of_one_field_a_line_without_empty_ones() -> None:
    assert encode(Commit.model_validate_json(json.dumps(COMMIT))).decode().splitlines() == [
        *("{", ' "format": 1,', ' "name": "checkpoint-20",', ' "step": 20,', ' "attempt": "a1",', ' "meta": {},'),
        *(' "files": 0,', ' "size_bytes": 0,', ' "manifests": [', "  {"),
        *(f'   "key": "{MANIFESTS}node-00000-of-00001.json",', '   "size_bytes": 1,', '   "crc64nvme": "0123456789abcdef"'),
        *("  }", " ]", "}"),
    ]


def test_epochs_begin_with_1() -> None:
    assert decode_commit(json.dumps(COMMIT | {"epoch": 1}).encode(), key=KEY).epoch == 1


def test_a_commit_under_another_checkpoints_name_is_refused() -> None:
    assert "commit of checkpoint-20" in commit_refusal(key="checkpoint-30/.complete")


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"null", b"\xff", b"{", b"[" * 100_000])
def test_an_empty_or_torn_document_is_corrupt(raw: bytes) -> None:
    with pytest.raises(ContractError, match=r"^k: "):
        decode_manifest(raw, key="k")
    with pytest.raises(ContractError, match=f"^{KEY}: "):
        decode_commit(raw, key=KEY)


def test_of_what_is_no_json_object_the_document_is_named() -> None:
    with pytest.raises(ContractError, match=r"^k: document: Input should be an object$"):
        decode_manifest(b"[]", key="k")


@pytest.mark.parametrize("key", ["attempt", "size_bytes"])
def test_a_document_with_a_key_twice_is_corrupt_because_readers_differ_in_which_they_take(key: str) -> None:
    for document, read, place in ((MANIFEST, decode_manifest, "k"), (COMMIT, decode_commit, KEY)):
        raw = json.dumps(document).replace(f'"{key}":', f'"{key}": 2, "{key}":').encode()
        raw = raw.replace(b'"attempt": 2', b'"attempt": "a2"')
        assert json.loads(raw) == document  # Python takes the last one
        with pytest.raises(ContractError, match=f"^{place}: the key '{key}' twice in one object"):
            read(raw, key=place)


def test_a_number_that_not_every_reader_takes_makes_a_document_corrupt() -> None:
    raw = json.dumps(MANIFEST).encode()[:-1] + b', "later": ' + b"9" * 5000 + b"}"
    with pytest.raises(ContractError, match=r"^k: "):
        decode_manifest(raw, key="k")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_checksum_of_a_file_is_a_number_or_its_text(crc: int, other: int) -> None:
    entry = FileEntry(path="model", key="checkpoint-1/model", size_bytes=1, crc64nvme=checksum.to_text(crc))
    assert entry.crc == crc
    assert entry.with_checksum(other).crc == other
    assert entry.crc == crc


def test_copies_of_manifests_and_records_are_read_as_they_were_written() -> None:
    bundle = ManifestBundle(name="checkpoint-1", attempt="a", manifests=())
    assert decode(ManifestBundle, encode(bundle), key="k") == bundle
    record = Quarantined(commit_crc64nvme="0" * 16, reason="a flipped bit", node="1", at=None)
    assert decode(Quarantined, encode(record), key="k") == record
    begun = BegunDeletion(last_write="2026-03-01T12:00:00.000Z")
    assert decode(BegunDeletion, encode(begun), key="k") == begun
    for kind in (ManifestBundle, Quarantined, BegunDeletion):
        with pytest.raises(ContractError, match=r"^k: "):
            decode(kind, b"{}", key="k")


def test_a_commit_names_the_writing_of_its_step() -> None:
    commit = decode_commit(json.dumps(COMMIT | {"created_at": "2026-03-01T12:00:00.000Z"}).encode(), key=KEY)
    assert commit.identity == SaveIdentity("a1", None, "2026-03-01T12:00:00.000Z", is_committed=True)
