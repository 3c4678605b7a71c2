"""Documents of the store: a node's manifest, and the commit that makes a step durable.

Both are JSON, format 1. A document that does not validate is corrupt, and a corrupt document is never used for a resume.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sidecar.core.format import checksum, keys
from sidecar.core.format.obstacles import contradiction
from trainer_hook.contract import (
    FORMAT,
    MARKER,
    SYSTEM_DIR,
    ContractError,
    LaterFormatError,
    Marker,
    Node,
    SaveIdentity,
    ambiguity,
    check_id,
    check_path,
    encode_marker,
    is_checkpoint_name,
    parse_marker,
    step_of,
)
from trainer_hook.contract.plain_text import plain_text

MAX_DOCUMENT_BYTES = 32 << 20
"""Maximum size of a document, for writers and readers: a manifest of 100,000 files, a commit of 99,999 nodes."""
MAX_MANIFESTS_BYTES = 128 << 20
"""Maximum size of all manifests of a commit together: a reader holds them in memory. 10,000 nodes with 40 files each."""
MAX_FILES = 400_000
"""Maximum number of files of a commit that a reader holds in memory."""
MAX_KEY_BYTES = 1024
"""Longest key of an object, UTF-8, with the prefix of ``CKPT_STORE``. Source: S3 user guide, "Naming Amazon S3 objects"."""
_MANIFEST = re.compile(r"node-[0-9]{5}-of-[0-9]{5}\.json", re.ASCII)
_NODE_FOLDER = re.compile(r"\.ckpt/[^/]+/node-[0-9]{5}/.+", re.DOTALL)


def _checked_name(name: str) -> str:
    if not is_checkpoint_name(name):
        raise ContractError(f"{name[:80]!r} is not the name of a checkpoint")
    return name


def _checked_crc(text: str) -> str:
    checksum.from_text(text)
    return text


Crc = Annotated[str, AfterValidator(_checked_crc)]
Path = Annotated[str, AfterValidator(check_path)]
Attempt = Annotated[str, AfterValidator(partial(check_id, what="attempt"))]
SaveId = Annotated[str, AfterValidator(partial(check_id, what="save_id"))]
Name = Annotated[str, AfterValidator(_checked_name)]
Size = Annotated[int, Field(ge=0)]
Epoch = Annotated[int, Field(ge=1)]


class _Document(BaseModel):
    # Unknown fields are ignored, because a later minor version may add some.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


_D = TypeVar("_D", bound=_Document)


class FileEntry(_Document):
    """One file of one node, with its key in the store."""

    path: Path
    key: str
    size_bytes: Size
    crc64nvme: Crc
    etag: str = ""
    part_bytes: Size = 0
    """Size of the first part in bytes; 0: sent in a single request."""

    @property
    def crc(self) -> int:
        """The checksum as an integer."""
        return checksum.from_text(self.crc64nvme)

    def with_checksum(self, crc: int) -> FileEntry:
        """Return the entry with another checksum."""
        return self.model_copy(update={"crc64nvme": checksum.to_text(crc)})


class NodeOf(_Document):
    """``Node`` as part of a document."""

    index: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _exists(self) -> NodeOf:
        Node(self.index, self.count)
        return self


class Manifest(_Document):
    """Manifest of one node, with all of its files: ``<name>/.ckpt/<attempt>/node-<index>-of-<count>.json``."""

    format: Literal[1] = FORMAT
    name: Name
    step: Annotated[int, Field(ge=0)] | None = None
    attempt: Attempt
    save_id: SaveId | None = None
    node: NodeOf
    reason: str | None = None
    created_at: str | None = None
    world_size: int | None = None
    meta: dict[str, Any] = {}
    files: tuple[FileEntry, ...]

    @property
    def key(self) -> str:
        """Its key in the store."""
        return keys.manifest(self.name, self.attempt, Node(self.node.index, self.node.count))


class ManifestEntry(_Document):
    """A commit's reference to a manifest, with the checksum of the manifest's bytes."""

    key: str
    size_bytes: Size
    crc64nvme: Crc


class Commit(_Document):
    """The commit, ``<name>/.complete``: the step is durable, and consists of the manifests named here."""

    format: Literal[1] = FORMAT
    name: Name
    step: Annotated[int, Field(ge=0)] | None = None
    attempt: Attempt
    save_id: SaveId | None = None
    epoch: Epoch | None = None
    """Epoch of the prefix under which the checkpoint was written; ``None``: unknown. Manifests have none: a node that starts
    again must write the same bytes, because a commit may name them."""
    reason: str | None = None
    created_at: str | None = None
    committed_at: str | None = None
    world_size: int | None = None
    meta: dict[str, Any] = {}
    files: Size = 0
    size_bytes: Size = 0
    manifests: Annotated[tuple[ManifestEntry, ...], Field(min_length=1)]

    @property
    def identity(self) -> SaveIdentity:
        """The writing of the step."""
        return SaveIdentity(self.attempt, self.save_id, self.created_at, is_committed=True)


class Quarantined(_Document):
    """Quarantine record, ``<name>/.ckpt/quarantined-<crc64nvme of the commit>.json``: this commit failed verification."""

    format: Literal[1] = FORMAT
    commit_crc64nvme: Crc
    reason: str
    node: str | None = None
    """The node that found the damage; ``None``: not recorded."""
    at: str | None = None
    missing: str | None = None
    """Key of an object that the store did not have: the record holds only until it has one. ``None``: it holds."""


class BegunDeletion(_Document):
    """Record of a deletion, ``<name>/.ckpt/deletion.json``: the commit is deleted next, the objects after it."""

    format: Literal[1] = FORMAT
    last_write: str
    """Time of the latest write to the checkpoint then, as the store's listings name it. What is written later is another's."""


class Gathered(_Document):
    """One manifest inside a bundle, with the bytes stored under ``key``."""

    key: str
    etag: str
    """Etag of the manifest when it was read. If the stored manifest has another one, this copy is stale."""
    text: str


class ManifestBundle(_Document):
    """Copies of several nodes' manifests in one object. An optional cache: each is validated as if it were read alone."""

    format: Literal[1] = FORMAT
    name: Name
    attempt: Attempt
    manifests: tuple[Gathered, ...]


class NodeReuploads(_Document):
    """Files that one node has to upload again: key by path."""

    etag: str
    """Etag of the node's manifest that the request refers to."""
    files: dict[Path, str]


class ReuploadRequest(_Document):
    """Request of the node that commits to others, ``<name>/.ckpt/<attempt>/mend.json``, by index of the node."""

    format: Literal[1] = FORMAT
    nodes: dict[str, NodeReuploads]


def decode_reupload_request(raw: bytes, *, key: str, name: str) -> ReuploadRequest:
    """Read a request to upload files again.

    Raises:
        ContractError: It is not one of format 1, or names a key that no such file of checkpoint ``name`` has; the text
            names ``key``.
    """
    request = decode(ReuploadRequest, raw, key=key)
    for node in request.nodes.values():
        for path, target in node.files.items():
            if not keys.is_key_of(target, name, path):
                raise ContractError(f"{key}: {target[:200]!r} is no object of {path[:200]!r} in {name}")
    return request


def decode(kind: type[_D], raw: bytes, *, key: str) -> _D:
    """Read a document of which the fields alone decide whether it is valid.

    Raises:
        ContractError: It is not one of format 1; the text names ``key`` and the field.
    """
    try:
        document = kind.model_validate_json(raw)
        unclear = ambiguity(raw)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        version = next((each["input"] for each in wrong if each["loc"] == ("format",)), None)
        if type(version) is int and version > FORMAT:
            raise LaterFormatError(version, of=key) from None
        first = wrong[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        said = plain_text(f"{place}: {first['msg']}")
        raise ContractError(f"{key}: {said}") from None
    if unclear is not None:
        raise ContractError(f"{key}: {plain_text(unclear)}")
    return document


def encode(document: Manifest | Commit | ManifestBundle | Quarantined | BegunDeletion | ReuploadRequest) -> bytes:
    """Return the bytes to store. Equal documents give equal bytes."""
    return document.model_dump_json(exclude_none=True, indent=1).encode() + b"\n"


def decode_manifest(raw: bytes, *, key: str) -> Manifest:
    """Read a manifest.

    Raises:
        ContractError: It is not a manifest of format 1; the text names ``key`` and the field.
    """
    manifest = decode(Manifest, raw, key=key)
    _check_step(manifest, key)
    _check_marker_fields(manifest, key)
    folder = keys.folder(manifest.name)
    foreign = [entry.key for entry in manifest.files if not entry.key.startswith(folder)]
    if foreign:
        raise ContractError(f"{key}: names {foreign[0][:200]!r}, which lies outside {folder}")
    if odd := [entry.key for entry in manifest.files if not _is_plain(entry.key)]:
        raise ContractError(f"{key}: names {odd[0][:200]!r}, which is no plain key")
    if reserved := [entry.key for entry in manifest.files if not _is_of_data(entry.key.removeprefix(folder))]:
        raise ContractError(f"{key}: names {reserved[0][:200]!r}, which is a document and no file of the checkpoint")
    if len({entry.path for entry in manifest.files}) != len(manifest.files):
        raise ContractError(f"{key}: lists a path twice")
    if why := contradiction(entry.path for entry in manifest.files):
        raise ContractError(f"{key}: {why}")
    return manifest


def _is_plain(key: str) -> bool:
    """Whether a key is valid in every store. Others are refused at every try. Each path that ``check_path`` takes gives one."""
    has_control = any(ord(c) < 32 or ord(c) == 127 for c in key)
    is_short = len(key.encode()) <= MAX_KEY_BYTES
    return is_short and not has_control and all(part not in ("", ".", "..") for part in key.split("/"))


def _is_of_data(inside: str) -> bool:
    """Whether a key, relative to its checkpoint, is one that files have: not the commit, a manifest or another document."""
    first = inside.partition("/")[0]
    return first != MARKER and (first != SYSTEM_DIR or _NODE_FOLDER.fullmatch(inside) is not None)


def decode_commit(raw: bytes, *, key: str) -> Commit:
    """Read a commit.

    Raises:
        ContractError: It is not a commit of format 1; the text names ``key`` and the field.
    """
    commit = decode(Commit, raw, key=key)
    if key != keys.commit(commit.name):
        raise ContractError(f"{key}: says that it is the commit of {commit.name}")
    _check_step(commit, key)
    _check_marker_fields(commit, key)
    folder = keys.manifests(commit.name, commit.attempt)
    for entry in commit.manifests:
        if not (entry.key.startswith(folder) and _MANIFEST.fullmatch(entry.key.removeprefix(folder))):
            raise ContractError(f"{key}: names {entry.key[:200]!r}, which is no manifest of attempt {commit.attempt}")
        if entry.size_bytes > MAX_DOCUMENT_BYTES:
            raise ContractError(f"{key}: {entry.key} has {entry.size_bytes} bytes, the maximum is {MAX_DOCUMENT_BYTES}")
    if (why := too_large(commit)) is not None:
        raise ContractError(f"{key}: {why}")
    return commit


def too_large(commit: Commit, *, files: int = 0) -> str | None:
    """Return why no reader takes a commit with manifests of these sizes, or ``None``. It must not be written then.

    ``files``: number of files in all of them, as far as it is known.
    """
    total_bytes = sum(entry.size_bytes for entry in commit.manifests)
    if total_bytes > MAX_MANIFESTS_BYTES:
        return f"its manifests have {total_bytes} bytes, the maximum is {MAX_MANIFESTS_BYTES}: save fewer and larger files"
    if files > MAX_FILES:
        return f"it has {files} files, the maximum is {MAX_FILES}: save fewer and larger files"
    return None


def decode_all(raw: Iterable[tuple[str, bytes]]) -> list[Manifest]:
    """Read the manifests of a commit, given with their keys.

    Raises:
        ContractError: One of them is not a manifest, or all together have more than ``MAX_FILES`` files.
    """
    manifests, files = [], 0
    for key, content in raw:
        manifests.append(decode_manifest(content, key=key))
        files += len(manifests[-1].files)
        if files > MAX_FILES:
            raise ContractError(f"{key}: with it the checkpoint has {files} files, the maximum is {MAX_FILES}")
    return manifests


def _check_marker_fields(document: Manifest | Commit, key: str) -> None:
    """Check the fields that came from a marker: a download writes them into one again, which the trainer reads."""
    marker = Marker(reason=document.reason, created_at=document.created_at, world_size=document.world_size, meta=document.meta)
    try:
        parse_marker(encode_marker(marker), name=document.name)
    except ContractError as error:
        raise ContractError(f"{key}: {error}") from None
    except (ValueError, RecursionError) as error:  # NaN, Infinity
        raise ContractError(f"{key}: meta holds what JSON cannot: {str(error)[:200]}") from None


def _check_step(document: Manifest | Commit, key: str) -> None:
    if document.step is not None and step_of(document.name) not in (None, document.step):
        raise ContractError(f"{key}: says step {document.step} of {document.name}")
