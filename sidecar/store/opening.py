"""From ``CKPT_STORE`` to a store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from sidecar.errors import ConfigurationError
from sidecar.store.file import FileStore
from sidecar.store.protocol import Store, Verification

if TYPE_CHECKING:
    from sidecar.settings import Settings

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", re.ASCII | re.IGNORECASE)


def open_from(settings: Settings) -> Store:
    """Return the store that the settings name. Nothing is contacted yet.

    Raises:
        ConfigurationError: ``CKPT_STORE`` is neither ``s3://bucket/prefix`` nor ``file:///path``.
    """
    url = urlsplit(settings.store)
    if "@" in url.netloc:  # not repeated: it may hold a secret
        raise ConfigurationError("CKPT_STORE must not hold credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if url.query or url.fragment:
        raise ConfigurationError(f"CKPT_STORE={settings.store!r} must have no '?' and no '#'")
    if url.scheme == "s3":
        return _open_s3(settings, url.netloc or settings.bucket or "", url.path.strip("/"))
    if url.scheme == "file":
        path = Path(unquote(url.path))
        if url.netloc or not path.is_absolute() or path == Path("/"):
            raise ConfigurationError(f"CKPT_STORE={settings.store!r} must be file:///path with an absolute path")
        if path == settings.dir or settings.dir in path.parents or path in settings.dir.parents:
            raise ConfigurationError(
                f"CKPT_STORE={settings.store!r} must lie outside CKPT_DIR={settings.dir}, on a volume that lasts"
            )
        return FileStore(path, verification=Verification.READ_BACK if settings.verify == "read-back" else Verification.FSYNC)
    raise ConfigurationError(f"CKPT_STORE={settings.store!r} must be s3://bucket/prefix or file:///path")


def _open_s3(settings: Settings, bucket: str, prefix: str) -> Store:
    from sidecar.store.s3 import S3Options, S3Store

    if not _BUCKET.fullmatch(bucket):
        raise ConfigurationError(
            f"CKPT_STORE={settings.store!r}: {bucket!r} is not a bucket name; write s3://bucket/prefix or set AWS_S3_BUCKET"
        )
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ConfigurationError(f"CKPT_STORE={settings.store!r}: the prefix must be a plain path")
    _check_endpoint(settings.endpoint_url)
    return S3Store(
        S3Options(
            bucket=bucket,
            prefix=prefix,
            endpoint_url=settings.endpoint_url,
            region=settings.region,
            verify_tls=settings.verify_tls,
            ca_bundle=settings.ca_bundle,
            sse=settings.sse,
            sse_kms_key_id=settings.sse_kms_key_id,
            concurrency=settings.concurrency,
            verify=settings.verify,
            credentials_dir=settings.credentials_dir,
        )
    )


def _check_endpoint(endpoint_url: str | None) -> None:
    if endpoint_url is None:
        return
    url = urlsplit(endpoint_url)
    if "@" in url.netloc:
        raise ConfigurationError("AWS_S3_ENDPOINT must not hold credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(f"AWS_S3_ENDPOINT={endpoint_url!r} must be https://host[:port] or http://host[:port]")
