"""The way to the store: boto3's client and the wire for bodies, timeouts, trust, credentials that rotate, few retries."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from sidecar.errors import StoreUnavailable
from sidecar.store.s3_signing import Signer
from sidecar.store.wire import Wire

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

Addressing = Literal["path", "virtual", "auto"]
SECRET_POLL_S = 5.0
AGAIN, AGAIN_IN_S = frozenset({500, 502, 503, 504}), 0.2
"""Answers that get a second try, and after how long."""
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach a bucket. ``None`` leaves it to botocore."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""
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
    """Longest wait for an answer, and for a block of a body to be taken."""


@dataclass(frozen=True, slots=True)
class Access:
    """One way to the store, as long as the credentials stay the same."""

    client: S3Client
    """For what is neither written nor read nor listed as an object."""
    signer: Signer
    wire: Wire


class Clients:
    """The access in use. Made anew when mounted credentials rotate, or when the store refused the ones in use."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._secrets: tuple[str | None, ...] = ()
        self._looked_s = 0.0
        self._made: Access | None = None
        self._closed = False
        self._addressing: Addressing = "path" if options.endpoint_url else "auto"

    def address_by(self, style: Literal["path", "virtual"]) -> None:
        """Name the bucket in the path or in the host from now on."""
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
            return self._made

    def forget(self) -> None:
        """Read credentials and certificates again before the next request. Requests under way keep what they have."""
        with self._lock:
            self._retire()

    def close(self) -> None:
        """End requests under way; those that begin from now on fail."""
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
    session = boto3.session.Session(aws_access_key_id=key_id, aws_secret_access_key=secret, aws_session_token=token)
    client: S3Client = session.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or ("us-east-1" if options.endpoint_url else None),
        verify=_trusted(options),
        config=_config(options, addressing),
    )
    client.meta.events.register("needs-retry.s3", _again_in_s)  # type: ignore[arg-type]
    client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    client.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
    wire = Wire(
        tls=_tls(options), connect_timeout_s=options.connect_timeout_s, stall_s=options.read_timeout_s, proxy_of=_proxy_of
    )
    return Access(client, Signer(client, session.get_credentials(), bucket=options.bucket), wire)


def _config(options: S3Options, addressing: Addressing) -> Config:
    return Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # who calls knows better when and how often
        max_pool_connections=options.concurrency + 4,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="checkpoint-sidecar",
        s3={"payload_signing_enabled": False, "addressing_style": addressing},
    )


def _tls(options: S3Options) -> ssl.SSLContext:
    """Return a context that trusts whom boto3 trusts."""
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


def _again_in_s(
    attempts: int, response: tuple[Any, Any] | None = None, caught_exception: Exception | None = None, **_: object
) -> float | None:
    """A kept-alive connection that the server closed meanwhile, and a lone 5xx, get a second try; the rest is the caller's."""
    if attempts > 1:
        return None
    if isinstance(caught_exception, ConnectionClosedError):
        return 0.0
    return AGAIN_IN_S if response is not None and response[0].status_code in AGAIN else None


def _add_md5(params: dict[str, Any], **_: object) -> None:
    # botocore would send a CRC32 in a header that some stores refuse; each takes the older one, and some insist on it.
    params["context"].get("checksum", {}).pop("request_algorithm", None)
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _send_small_bodies_at_once(params: dict[str, Any], **_: object) -> None:
    # Bytes, which botocore has made a BytesIO of. Waiting for "100 Continue" would take longer than sending them.
    if isinstance(params.get("body"), io.BytesIO):
        params["headers"].pop("Expect", None)


def _read_secrets(folder: Path | None) -> tuple[str | None, ...]:
    if folder is None:
        return ()
    return tuple((folder / name).read_text().strip() or None if (folder / name).is_file() else None for name in _SECRETS)
