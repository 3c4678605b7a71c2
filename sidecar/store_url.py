"""Where a store is: the one rule for what ``CKPT_STORE`` and ``--store`` may be. Nothing is opened or contacted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", re.ASCII | re.IGNORECASE)

MAX_PREFIX_BYTES = 800
"""Longest prefix, UTF-8: leaves room for the longest key of a document, a manifest's of up to 189 bytes."""
_USER = re.compile(r"^([a-z0-9+.-]*:?//)?[^/]*@", re.IGNORECASE)
_QUERY = re.compile(r"([?#]).*", re.DOTALL)
_VARIABLE = re.compile(r"\$\([^)]*\)")


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """A prefix of a bucket; an empty prefix is the whole of it."""

    bucket: str
    prefix: str


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """A folder of a volume that lasts."""

    path: Path


def store_place(url: str, *, bucket: str | None = None, volume: Path | None = None) -> BucketPlace | FolderPlace:
    """Return what a URL names.

    Args:
        url: ``s3://bucket/prefix`` or ``file:///path``.
        bucket: Fills in ``s3:///prefix``.
        volume: The shared volume, which no store may lie in or hold.

    Raises:
        ValueError: Says what the URL must be. Neither this text nor ``shown`` repeats credentials.
    """
    if (variable := _VARIABLE.search(url)) is not None:
        raise ValueError(
            f"still has {variable[0]}: Kubernetes fills in only variables that stand before CKPT_STORE in the container's env"
        )
    if not url.isprintable():  # urlsplit leaves tabs and line breaks out
        raise ValueError("must have no tab, no line break and no other control character")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("must be s3://bucket/prefix or file:///path") from None
    if "@" in parts.netloc:
        raise ValueError("must not hold credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if parts.query or parts.fragment:
        raise ValueError("must have no '?' and no '#'")
    if parts.scheme == "s3":
        return _bucket_place(parts.netloc or bucket or "", parts.path.strip("/"))
    if parts.scheme != "file":
        raise ValueError("must be s3://bucket/prefix or file:///path")
    path = Path(unquote(parts.path))
    if ".." in path.parts:
        raise ValueError("must be file:///path without '..'")
    if parts.netloc or not path.is_absolute() or path == Path("/"):
        raise ValueError("must be file:///path with an absolute path")
    if volume is not None and (path == volume or volume in path.parents or path in volume.parents):
        raise ValueError(f"must lie outside CKPT_DIR={volume}, on a volume that lasts")
    return FolderPlace(path)


def shown(url: str) -> str:
    """Return the URL as it may stand in a message: without a user, with or without a scheme, and without a signature."""
    return _USER.sub(r"\1…@", _QUERY.sub(r"\1…", url))


def _bucket_place(bucket: str, prefix: str) -> BucketPlace:
    if not bucket:
        raise ValueError("names no bucket: it must be s3://bucket/prefix, or AWS_S3_BUCKET must be set")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"names no bucket: {bucket!r} is no bucket name: 3 to 63 characters, letters, digits, '.', '-' and '_', "
            "with a letter or digit at both ends"
        )
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise ValueError("must have a plain path as its prefix, without '//', '.' and '..'")
    if len(prefix.encode()) > MAX_PREFIX_BYTES:
        raise ValueError(f"has a prefix of {len(prefix.encode())} bytes, {MAX_PREFIX_BYTES} at most: keys of S3 have 1,024")
    return BucketPlace(bucket, prefix)
