"""Steps that are committed and must not be resumed: what is wrong with each, and words of the reason that is told."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidecar.core.format.checksum import text_of
from tests.hostile.bucket.forged import Forged, repeated, replacing

DEEP = b"[" * 100_000
MOST_DOCUMENT_BYTES = 32 << 20
Change = Callable[[Forged], None]


@dataclass(frozen=True)
class Case:
    """``says``: part of the reason. ``change`` turns a whole step into one that must not be used."""

    name: str
    says: str
    change: Change


def number(text: str) -> list[Case]:
    """Return a manifest and a commit with a size that is none."""

    def in_manifest(step: Forged) -> None:
        step.file["size_bytes"] = 4711
        step.raw_manifest = replacing(b": 4711", b": " + text.encode())

    def in_commit(step: Forged) -> None:
        step.commit["size_bytes"] = 4711
        step.raw_commit = replacing(b": 4711", b": " + text.encode())

    manifest = "/.ckpt/a/node-00000-of-00001.json: files.0."
    return [Case(f"size {text}", manifest, in_manifest), Case(f"commit's size {text}", ".complete: size_bytes: ", in_commit)]


def meta(text: str, says: str) -> Case:
    def change(step: Forged) -> None:
        step.both(meta={"loss": 4711})
        step.raw_manifest = step.raw_commit = replacing(b"4711", text.encode())

    return Case(f"meta {text[:10]} of {len(text)}", says, change)


def both(says: str, /, **fields: Any) -> Case:
    """Return a step whose manifest and commit say the same wrong thing."""
    return Case(str(fields), says, lambda step: step.both(**fields))


def path(text: str, says: str) -> Case:
    def change(step: Forged) -> None:
        step.add("other", b"x")
        step.manifest["files"][1]["path"] = text

    return Case(f"path {text[:20]!r}", says, change)


def key(text: str, says: str) -> Case:
    def change(step: Forged) -> None:
        step.file["key"] = text.format(name=step.name)

    return Case(f"key {text[:30]!r} of {len(text)}", says, change)


def stored(name: str, content: Callable[[bytes], bytes], says: str = "its writer recorded") -> Case:
    """Return a step whose object is another one than recorded."""

    def change(step: Forged) -> None:
        step.data = {key: content(was) for key, was in step.data.items()}

    return Case(name, says, change)


def of_manifest(name: str, says: str, /, **fields: Any) -> Case:
    return Case(name, says, lambda step: step.manifest.update(fields))


def of_file(name: str, says: str, /, **fields: Any) -> Case:
    return Case(name, says, lambda step: step.file.update(fields))


def entries(name: str, says: str, *changed: dict[str, Any]) -> Case:
    """Return a step whose commit names these manifests; ``{name}`` in a key is the step's."""

    def change(step: Forged) -> None:
        usual = {"key": step.manifest_key, "size_bytes": 0, "crc64nvme": "0" * 16}
        named = [usual | entry for entry in changed]
        step.commit["manifests"] = [entry | {"key": entry["key"].format(name=step.name)} for entry in named]

    return Case(f"manifests: {name}", says, change)


def raw_commit(name: str, change: Callable[[Forged, bytes], bytes], says: str = "Invalid JSON") -> Case:
    def of_step(step: Forged) -> None:
        step.raw_commit = lambda raw: change(step, raw)

    return Case(f"commit: {name}", says, of_step)


def raw_manifest(name: str, change: Callable[[Forged, bytes], bytes], says: str = "Invalid JSON") -> Case:
    def of_step(step: Forged) -> None:
        step.raw_manifest = lambda raw: change(step, raw)

    return Case(f"manifest: {name}", says, of_step)


def named_twice(_: Forged, raw: bytes) -> bytes:
    begin, end = raw.index(b"[{") + 1, raw.index(b"}]") + 1
    return raw[:end] + b", " + raw[begin:end] + raw[end:]


def with_second_manifests(step: Forged, raw: bytes) -> bytes:
    """Repeat a key of the object. Readers differ in which of the two they take."""
    return raw[:-1] + b', "manifests": [{"key": "%s", "size_bytes": 0, "crc64nvme": "0000000000000000"}]}' % (
        step.manifest_key.encode()
    )


def with_unreadable_quarantine(step: Forged, raw: bytes) -> bytes:
    step.extra[f"{step.name}/.ckpt/quarantined-{text_of(raw)}.json"] = DEEP
    return raw


PLAIN = ["..", "../other", "a/../../other", "/etc/passwd", "a//b", "./a", "a/", "", "a\0b", "a\nb", "a\x1b[31mb", "a\x7fb"]
RESERVED = [".ckpt", ".ckpt/token", ".ckpt/terminating", ".complete", ".complete/x"]
FOREIGN = ["checkpoint-1/model", "run.json", "", "/etc/passwd", "../{name}/model", "{name}", "s3://other/{name}/model"]
NOT_PLAIN = [
    "{name}/../checkpoint-1/model",
    "{name}//model",
    "{name}/",
    "{name}/a\0",
    "{name}/\n",
    "{name}/\x7f",
    "{name}/./m",
]
PARTS = "{name}/.ckpt/a/"
NO_MANIFEST = "which is no manifest of attempt a"

CASES = [
    *(case for text in ("NaN", "Infinity", "1e400", "-1", "true", '"5"', "1.5", "-0.5") for case in number(text)),
    meta("NaN", "meta holds what JSON cannot"),
    meta("1e400", "meta holds what JSON cannot"),
    meta("-Infinity", "meta holds what JSON cannot"),
    meta('"\\ud800"', "Invalid JSON"),
    meta("[" * 90 + "]" * 90, "meta is nested deeper than 64"),
    meta("[" * 100_000 + "]" * 100_000, "Invalid JSON"),
    meta('"' + "x" * 70_000 + '"', "meta is larger than"),
    both("reason is 'urgent'", reason="urgent"),
    both("is not an RFC 3339 timestamp", created_at="yesterday"),
    both("is not a time of this calendar", created_at="9999-12-31T23:59:59Z"),
    both("world_size must be an integer", world_size=-8),
    both("attempt", attempt="../../checkpoint-1"),
    both("save_id", save_id="a/b"),
    both("format", format=2),
    both("name", name="checkpoint-1/../checkpoint-2"),
    both("says that it is the commit of checkpoint-1", name="checkpoint-1"),
    both("says step 4711", step=4711),
    both("step", step=True),
    *(path(text, "is not a plain path") for text in PLAIN),
    *(path(text, "is reserved") for text in RESERVED),
    path("x" * 300, "file systems take 255"),
    path("\u00e9" * 200, "file systems take 255"),
    path("x/" * 500 + "x", "is longer than"),
    path("model", "lists a path twice"),
    path("model/deep", "'model' is a file and the directory of 'model/deep'"),
    *(key(text, "lies outside") for text in FOREIGN),
    *(key(text, "which is no plain key") for text in NOT_PLAIN),
    key("{name}/" + "x" * 1100, "which is no plain key"),
    key("{name}/.complete", "which is a document"),
    key(PARTS + "node-00000-of-00001.json", "which is a document"),
    key("{name}/" + "x" * 900, "missing in the store"),
    Case("object that is missing", "missing in the store", lambda step: step.data.clear()),
    stored("object that is longer", lambda content: content + b"!"),
    stored("object that is shorter", lambda content: content[:-1]),
    stored("object that is empty", lambda _: b""),
    stored("object that is compressed", gzip.compress),
    of_file("ten gigabytes that are claimed", "its writer recorded", size_bytes=10 << 30),
    of_file("more bytes than there are", "its writer recorded", size_bytes=10**80),
    of_manifest("node that is none of the job", "node", node={"index": 1, "count": 1}),
    of_manifest("node of a billion", "node", node={"index": 0, "count": 10**9}),
    of_manifest("node whose other is missing", "not of one each", node={"index": 0, "count": 2}),
    of_manifest("node that is a bool", "node", node={"index": False, "count": True}),
    of_manifest("manifest of another step", "another attempt or checkpoint", name="checkpoint-1", step=1, files=[]),
    of_manifest("manifest of another attempt", "another attempt or checkpoint", attempt="b"),
    entries("none", "manifests"),
    entries("another checksum", "the commit says", {"size_bytes": 100_000}),
    entries("another size", "the commit says 0", {}),
    entries("negative", "size_bytes", {"size_bytes": -1}),
    entries("no checksum", "crc64nvme", {"crc64nvme": "x"}),
    entries("long checksum", "crc64nvme", {"crc64nvme": "0" * 17}),
    entries("missing", "missing in the store", {"key": PARTS + "node-00001-of-00002.json"}),
    entries("of another checkpoint", NO_MANIFEST, {"key": "checkpoint-1/.ckpt/a/node-00000-of-00001.json"}),
    entries("of another attempt", NO_MANIFEST, {"key": "{name}/.ckpt/b/node-00000-of-00001.json"}),
    entries("of the root", NO_MANIFEST, {"key": "run.json"}),
    entries("by a way up", NO_MANIFEST, {"key": PARTS + "../../../checkpoint-1/.ckpt/a/node-00000-of-00001.json"}),
    entries("NUL", NO_MANIFEST, {"key": PARTS + "\0.json"}),
    entries("two slashes", NO_MANIFEST, {"key": PARTS + "/node-00000-of-00001.json"}),
    entries("escape", NO_MANIFEST, {"key": PARTS + "\x1b[31m\n.json"}),
    entries("long", NO_MANIFEST, {"key": PARTS + "x" * 2000}),
    entries("ten gigabytes", "has 10737418240 bytes, the maximum is", {"size_bytes": 10 << 30}),
    entries("many gigabytes", "its manifests have", *[{"size_bytes": MOST_DOCUMENT_BYTES}] * 100),
    raw_commit("manifest twice", named_twice, "not of one each"),
    raw_commit("a second list of manifests", with_second_manifests, "the key 'manifests' twice in one object"),
    raw_commit("empty", lambda *_: b""),
    raw_commit("deep", lambda *_: DEEP),
    raw_commit("deep, with an end", lambda *_: DEEP + b"]" * len(DEEP)),
    raw_commit("deep objects", lambda *_: b'{"meta":' * 100_000),
    raw_commit("page", lambda *_: b"<html>Please come back later</html>"),
    raw_commit("list", lambda *_: b"[]", "document"),
    raw_commit("null", lambda *_: b"null", "document"),
    raw_commit("no UTF-8", lambda *_: b'{"format": 1, "name": "\xff"}'),
    raw_commit("UTF-16", lambda *_: '{"format": 1}'.encode("utf-16")),
    raw_commit("zeros", lambda *_: bytes(100_000)),
    raw_commit("compressed", lambda _, raw: gzip.compress(raw)),
    raw_manifest("compressed", lambda _, raw: gzip.compress(raw)),
    raw_manifest("deep", lambda *_: DEEP),
    raw_commit("quarantine that is no record", with_unreadable_quarantine, "is bad, and its record cannot be read"),
]


def _as_large_as_allowed(step: Forged, _: bytes) -> bytes:
    """Return the most files that one manifest can have, in as few bytes as possible."""
    file = b'{"path":"f%d","key":"' + step.name.encode() + b'/f","size_bytes":1,"crc64nvme":"0123456789abcdef"}'
    head = b'{"format":1,"name":"%s","step":%d,"attempt":"a","created_at":"%s","meta":{},"node":{"index":0,"count":1},"files":['
    head %= step.name.encode(), step.step, step.manifest["created_at"].encode()
    return repeated((MOST_DOCUMENT_BYTES - 1000) // 101, file, around=(head, b"]}"))


def _a_million_manifests(step: Forged, _: bytes) -> bytes:
    entry = b'{"key":"' + step.manifest_key.encode() + b'","size_bytes":%d,"crc64nvme":"0123456789abcdef"}'
    return repeated(
        1_000_000, entry, around=(b'{"format":1,"name":"%s","attempt":"a","manifests":[' % step.name.encode(), b"]}")
    )


def _a_million_files(step: Forged, _: bytes) -> bytes:
    file = b'{"path":"%d","key":"' + step.name.encode() + b'/f","size_bytes":1,"crc64nvme":"0123456789abcdef"}'
    return repeated(1_000_000, file, around=(b'{"files":[', b"]}"))


LARGE_CASES = [
    raw_manifest("as large as allowed", _as_large_as_allowed, "missing in the store"),
    raw_commit("a million manifests", _a_million_manifests, "and this document has 33554432 at most"),
    raw_manifest("a million files", _a_million_files, "bytes, the maximum is 33554432"),
]
