"""Lines of an upload journal, and their validation.

The trainer may be able to write to the journal. A line is therefore valid only if it is complete, has the right types and
sizes, and names an object that belongs to a file of its checkpoint. A forged line can then only cause that checkpoint to be
sent again.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sidecar.core.format import keys
from sidecar.core.format.manifest import FileEntry, Path
from trainer_hook.contract import ContractError, ambiguity
from trainer_hook.contract.plain_text import plain_text

MAX_LINE_BYTES = 16 << 10
"""Maximum length: enough for a path, a key that repeats it and an upload's id."""
_MOST_PARTS = 10_000
_MOST_BYTES = 1 << 50

_Stamp = Annotated[str, Field(max_length=128)]
_Text = Annotated[str, Field(min_length=1, max_length=2048, pattern=r"^[\x21-\x7e]+$")]
_Crc = Annotated[int, Field(ge=0, lt=1 << 64)]
_Size = Annotated[int, Field(ge=0, le=_MOST_BYTES)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Begun(_Line):
    """A multipart upload was created for the version of a file that its stamp names."""

    event: Literal["begun"] = "begun"
    path: Path
    stamp: _Stamp
    upload_id: _Text
    key: str
    part_bytes: Annotated[int, Field(ge=1, le=_MOST_BYTES)]


class PartSent(_Line):
    """A part is stored."""

    event: Literal["part"] = "part"
    path: Path
    number: Annotated[int, Field(ge=1, le=_MOST_PARTS)]
    size_bytes: _Size
    etag: Annotated[str, Field(max_length=256)]
    crc: _Crc


class FileStored(_Line):
    """A file is stored completely."""

    event: Literal["stored"] = "stored"
    stamp: _Stamp
    first_crc: _Crc | None = None
    entry: FileEntry


class Grown(_Line):
    """A file whose beginning was sent while it was being written is complete."""

    event: Literal["grown"] = "grown"
    path: Path
    stamp: _Stamp


class FileChange(_Line):
    """The parts of a file are void, have to be compared, or were compared."""

    event: Literal["dropped", "unconfirmed", "confirmed"]
    path: Path


Line = Begun | PartSent | FileStored | Grown | FileChange
_LINES: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


def encode_line(line: Line) -> bytes:
    """Return the bytes of a line."""
    return line.model_dump_json().encode() + b"\n"


def decode_line(raw: bytes, *, name: str) -> Line:
    """Read a line of the journal of a checkpoint.

    Raises:
        ContractError: It is truncated, malformed, too large, or names an object of another checkpoint.
    """
    if len(raw) > MAX_LINE_BYTES:
        raise ContractError(f"a line of {len(raw)} bytes is longer than {MAX_LINE_BYTES}")
    try:
        line, unclear = _LINES.validate_json(raw), ambiguity(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "line"
        raise ContractError(plain_text(f"{place}: {first['msg']}")) from None
    if unclear is not None:
        raise ContractError(plain_text(unclear))
    if isinstance(line, Begun):
        _check_key(line.key, name, line.path)
    elif isinstance(line, FileStored):
        _check_key(line.entry.key, name, line.entry.path)
        if max(line.entry.size_bytes, line.entry.part_bytes) > _MOST_BYTES or len(line.entry.etag) > 256:
            raise ContractError(f"{line.entry.path[:200]!r}: no object is that large, or has such an etag")
    return line


def _check_key(key: str, name: str, path: str) -> None:
    """Raise ``ContractError`` unless a file of this path can have this key in the checkpoint (FORMAT.md, "In the store")."""
    if not keys.is_key_of(key, name, path):
        raise ContractError(f"{key[:200]!r} is no object of {path[:200]!r} in {name}")
