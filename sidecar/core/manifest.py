"""The two documents of the store: a node's manifest, and the commit that makes a step durable.

Both are JSON, format 1, read strictly: what does not parse is corrupt, and a corrupt document is never used for a resume.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sidecar.core import checksum, keys
from trainer_hook.contract import FORMAT, ContractError, Node, check_id, check_path, is_checkpoint_name, step_of


def _checked_path(path: str) -> str:
    return check_path(path)


def _checked_attempt(attempt: str) -> str:
    return check_id(attempt, what="attempt")


def _checked_save_id(save_id: str) -> str:
    return check_id(save_id, what="save_id")


def _checked_name(name: str) -> str:
    if not is_checkpoint_name(name):
        raise ContractError(f"{name!r} is not the name of a checkpoint")
    return name


def _checked_crc(text: str) -> str:
    checksum.from_text(text)
    return text


Crc = Annotated[str, AfterValidator(_checked_crc)]
Path = Annotated[str, AfterValidator(_checked_path)]
Attempt = Annotated[str, AfterValidator(_checked_attempt)]
SaveId = Annotated[str, AfterValidator(_checked_save_id)]
Name = Annotated[str, AfterValidator(_checked_name)]
Size = Annotated[int, Field(ge=0)]


class _Document(BaseModel):
    # Unknown fields are kept out, not refused: a later minor version may add some.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class FileEntry(_Document):
    """One file of one node and where the store has it."""

    path: Path
    key: str
    size_bytes: Size
    crc64nvme: Crc
    etag: str = ""
    part_bytes: Size = 0
    """Size of the parts it was sent in; 0 for a single request."""

    @property
    def crc(self) -> int:
        """The checksum as a number."""
        return checksum.from_text(self.crc64nvme)

    def with_checksum(self, crc: int) -> FileEntry:
        """Return the same entry for other content."""
        return self.model_copy(update={"crc64nvme": checksum.to_text(crc)})


class NodeOf(_Document):
    """``Node`` as a document."""

    index: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _exists(self) -> NodeOf:
        Node(self.index, self.count)
        return self


class Manifest(_Document):
    """All files of one node: ``<name>/.ckpt/<attempt>/node-<index>-of-<count>.json``."""

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


class ManifestEntry(_Document):
    """A manifest that a commit names, with the checksum of its bytes."""

    key: str
    size_bytes: Size
    crc64nvme: Crc


class Commit(_Document):
    """``<name>/.complete``: the step is durable, and this is all that belongs to it."""

    format: Literal[1] = FORMAT
    name: Name
    step: Annotated[int, Field(ge=0)] | None = None
    attempt: Attempt
    save_id: SaveId | None = None
    reason: str | None = None
    created_at: str | None = None
    committed_at: str | None = None
    world_size: int | None = None
    meta: dict[str, Any] = {}
    files: Size = 0
    size_bytes: Size = 0
    manifests: Annotated[tuple[ManifestEntry, ...], Field(min_length=1)]


class Gathered(_Document):
    """One manifest within a digest, as its bytes are stored under ``key``."""

    key: str
    etag: str
    """Of the manifest when it was read: another one in the store means that this copy is out of date."""
    text: str


class Digest(_Document):
    """Manifests of several nodes in one object. A copy that nothing depends on: each is checked as if it were read alone."""

    format: Literal[1] = FORMAT
    name: Name
    attempt: Attempt
    manifests: tuple[Gathered, ...]


def decode_digest(raw: bytes, *, key: str) -> Digest:
    """Read a digest.

    Raises:
        ContractError: Not a digest of format 1; the text names ``key`` and the field.
    """
    return _decode(Digest, raw, key)


def encode(document: Manifest | Commit | Digest) -> bytes:
    """Return the bytes to store. Equal documents give equal bytes."""
    return document.model_dump_json(exclude_none=True, indent=1).encode() + b"\n"


def decode_manifest(raw: bytes, *, key: str) -> Manifest:
    """Read a manifest.

    Raises:
        ContractError: Not a manifest of format 1; the text names ``key`` and the field.
    """
    manifest = _decode(Manifest, raw, key)
    _check_step(manifest, key)
    folder = keys.folder(manifest.name)
    foreign = [entry.key for entry in manifest.files if not entry.key.startswith(folder)]
    if foreign:
        raise ContractError(f"{key}: names {foreign[0]!r}, which lies outside {folder}")
    if len({entry.path for entry in manifest.files}) != len(manifest.files):
        raise ContractError(f"{key}: lists a path twice")
    return manifest


def decode_commit(raw: bytes, *, key: str) -> Commit:
    """Read a commit.

    Raises:
        ContractError: Not a commit of format 1; the text names ``key`` and the field.
    """
    commit = _decode(Commit, raw, key)
    if key != keys.commit(commit.name):
        raise ContractError(f"{key}: says that it is the commit of {commit.name}")
    _check_step(commit, key)
    foreign = [entry.key for entry in commit.manifests if not entry.key.startswith(keys.manifests(commit.name, commit.attempt))]
    if foreign:
        raise ContractError(f"{key}: names {foreign[0]!r}, which is no manifest of attempt {commit.attempt}")
    return commit


def _check_step(document: Manifest | Commit, key: str) -> None:
    if document.step is not None and step_of(document.name) not in (None, document.step):
        raise ContractError(f"{key}: says step {document.step} of {document.name}")


_D = TypeVar("_D", bound=_Document)


def _decode(kind: type[_D], raw: bytes, key: str) -> _D:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise ContractError(f"{key}: {place}: {first['msg']}") from None
