"""Opens the store that ``CKPT_STORE`` names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sidecar.errors import ConfigurationError
from sidecar.store.file.store import FileStore
from sidecar.store.protocol import Store, Verification
from sidecar.store_url import BucketPlace, FolderPlace, shown, store_place

if TYPE_CHECKING:
    from sidecar.daemon.settings import Settings


def open_from(settings: Settings) -> Store:
    """Return the store that the settings name, without contacting it.

    Raises:
        ConfigurationError: ``CKPT_STORE`` is neither ``s3://bucket/prefix`` nor ``file:///path``, or lies on the shared volume.
    """
    return _opened(settings, place_of(settings))


def open_anywhere(settings: Settings) -> Store:
    """Return the store as ``open_from``, where no volume is shared with a trainer: a person names it in a command."""
    return _opened(settings, _place(settings, None, said=""))


def place_of(settings: Settings) -> BucketPlace | FolderPlace:
    """Return where the store is that the settings name; raises as ``open_from`` does."""
    return _place(settings, settings.dir, said="CKPT_STORE=")


def _place(settings: Settings, volume: Path | None, *, said: str) -> BucketPlace | FolderPlace:
    try:
        return store_place(settings.store, bucket=settings.bucket, volume=volume)
    except ValueError as error:
        raise ConfigurationError(f"{said}{shown(settings.store)!r} {error}") from None


def _opened(settings: Settings, place: BucketPlace | FolderPlace) -> Store:
    if isinstance(place, FolderPlace):
        verification = Verification.READ_BACK if settings.verify == "read-back" else Verification.FSYNC
        return FileStore(place.path, verification=verification)
    return _open_s3(settings, place)


def _open_s3(settings: Settings, place: BucketPlace) -> Store:
    from sidecar.store.s3.store import S3Options, S3Store

    _check_endpoint(settings.endpoint_url)
    return S3Store(
        S3Options(
            bucket=place.bucket,
            prefix=place.prefix,
            endpoint_url=settings.endpoint_url,
            region=settings.region,
            verify_tls=settings.verify_tls,
            ca_bundle=settings.ca_bundle,
            sse=settings.sse,
            sse_kms_key_id=settings.sse_kms_key_id,
            acl=settings.s3_acl,
            request_payer=settings.s3_request_payer,
            concurrency=settings.concurrency,
            verify=settings.verify,
            credentials_dir=settings.credentials_dir,
            client=settings.s3_client,
        )
    )


def _check_endpoint(endpoint_url: str | None) -> None:
    if endpoint_url is None:
        return
    try:
        url = urlsplit(endpoint_url)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # no port, or half an IPv6 address
        url, is_address = urlsplit(""), False
    if "@" in url.netloc:
        raise ConfigurationError("AWS_S3_ENDPOINT must not hold credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if not is_address or url.query or url.fragment:
        raise ConfigurationError(f"AWS_S3_ENDPOINT={shown(endpoint_url)!r} must be https://host[:port] or http://host[:port]")
