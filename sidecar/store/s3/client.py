"""Access to a bucket: boto3's client, the signer and the HTTP transport, with timeouts, trust and rotating credentials."""

from __future__ import annotations

import functools
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import boto3
import botocore.session
from botocore.config import Config
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from sidecar.errors import StoreUnavailable
from sidecar.store.http.wire import Wire
from sidecar.store.s3.signing import Signer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

Addressing = Literal["path", "virtual", "auto"]
SECRET_POLL_S = 5.0
AGAIN, AGAIN_IN_S = frozenset({500, 502, 503, 504}), 0.2
"""Statuses that are retried once, and the delay in seconds."""
FETCHING_CREDENTIALS = Config(connect_timeout=2, read_timeout=2, retries={"total_max_attempts": 5, "mode": "standard"})
"""For botocore's STS client (web identity roles), which would wait for a minute by default. The metadata services of EC2 and of
containers have timeouts of their own, 1 and 2 s."""
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach a bucket. ``None``: botocore's default."""

    bucket: str
    prefix: str
    """Without leading and trailing slashes; may be empty."""
    endpoint_url: str | None = None
    region: str | None = None
    verify_tls: bool = True
    ca_bundle: Path | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    concurrency: int = 4
    verify: Literal["auto", "md5", "read-back", "off"] = "auto"
    credentials_dir: Path | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    """Longest wait for an answer, and for progress of a body."""


@dataclass(frozen=True, slots=True)
class Access:
    """Client, signer and transport of one set of credentials."""

    client: S3Client
    """For requests that are not about objects."""
    signer: Signer
    wire: Wire


class Clients:
    """Holds the current ``Access``; replaces it when mounted credentials rotate, or after the store refused them."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._secrets: tuple[str | None, ...] = ()
        self._looked_s = 0.0
        self._made: Access | None = None
        self._closed = False
        self._hurried = False
        self._addressing: Addressing = "path" if options.endpoint_url else "auto"

    def address_by(self, style: Literal["path", "virtual"]) -> None:
        """Switch to path-style or virtual-hosted addresses."""
        with self._lock:
            self._addressing = style
            self._retire()

    def current(self) -> Access:
        """Return the access for the next request.

        Raises:
            StoreUnavailable: The store was closed.
        """
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"s3://{self._options.bucket}: the store was closed")
            now_s = time.monotonic()
            if self._made is None or (self._options.credentials_dir and now_s - self._looked_s > SECRET_POLL_S):
                self._looked_s = now_s
                secrets = _read_secrets(self._options.credentials_dir)
                if self._made is None or secrets != self._secrets:
                    self._retire()
                    self._made, self._secrets = _make_access(self._options, secrets, self._addressing), secrets
                    self._made.wire.hurry(self._hurried)
            return self._made

    def hurry(self, hurried: bool) -> None:
        """Hedge sooner after a termination notice (``True``), or as usual once the notice is withdrawn (``False``)."""
        with self._lock:
            self._hurried = hurried
            if self._made is not None:
                self._made.wire.hurry(hurried)

    def forget(self) -> None:
        """Read credentials and certificates again before the next request. Requests in flight keep theirs."""
        with self._lock:
            self._retire()

    def close(self) -> None:
        """Abort requests in flight; later ones fail."""
        with self._lock:
            self._closed = True
            if self._made is not None:
                self._made.wire.close()
                self._made.client.close()

    def _retire(self) -> None:
        if self._made is not None:
            self._made.wire.retire()
        self._made = None


def _make_access(options: S3Options, secrets: Sequence[str | None], addressing: Addressing) -> Access:
    key_id, secret, token = secrets if secrets else (None, None, None)
    underlying = botocore.session.get_session()
    underlying.set_default_client_config(FETCHING_CREDENTIALS)
    session = boto3.session.Session(
        aws_access_key_id=key_id, aws_secret_access_key=secret, aws_session_token=token, botocore_session=underlying
    )
    client: S3Client = session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or ("us-east-1" if options.endpoint_url else None),
        verify=_trusted(options),
        config=_config(options, addressing),
    )
    wire = Wire(
        tls=_tls(options), connect_timeout_s=options.connect_timeout_s, stall_s=options.read_timeout_s, proxy_of=_proxy_of
    )
    return Access(client, Signer(client, session.get_credentials(), bucket=options.bucket), wire)


def _config(options: S3Options, addressing: Addressing) -> Config:
    return Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # the caller decides about retries
        max_pool_connections=options.concurrency + 4,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="checkpoint-sidecar",
        s3={"payload_signing_enabled": False, "addressing_style": addressing},
    )


def _tls(options: S3Options) -> ssl.SSLContext:
    """Return a context that trusts the same authorities as boto3."""
    trusted = _trusted(options)
    if trusted is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=str(trusted or os.environ.get("AWS_CA_BUNDLE") or get_cert_path(True)))


@functools.lru_cache
def _proxy_of(origin: str) -> str | None:
    proxies: dict[str, str] = get_environ_proxies(origin)
    return proxies.get(origin.partition(":")[0])


def _trusted(options: S3Options) -> bool | str | None:
    if not options.verify_tls:
        return False
    return str(options.ca_bundle) if options.ca_bundle else None  # None: AWS_CA_BUNDLE, else the system's


def _read_secrets(folder: Path | None) -> tuple[str | None, ...]:
    if folder is None:
        return ()
    return tuple((folder / name).read_text().strip() or None if (folder / name).is_file() else None for name in _SECRETS)
