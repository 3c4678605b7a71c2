"""The boto3 client: timeouts, credentials that rotate, few retries, bodies that leave in large blocks."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import boto3
from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError

from sidecar.errors import StoreUnavailable
from sidecar.store.slice import FileSlice

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SEND_BLOCK_BYTES = 256 << 10
"""What is handed to the socket at once: more costs the cache of the CPU, less costs system calls."""
SECRET_POLL_S = 5.0
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


class Clients:
    """The client in use. Made anew when mounted credentials rotate, or when the store refused the ones in use."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._secrets: tuple[str | None, ...] = ()
        self._looked_s = 0.0
        self._made: S3Client | None = None
        self._closed = False

    def current(self) -> S3Client:
        """Return the client for the next request.

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
                    self._made, self._secrets = _make_client(self._options, secrets), secrets
            return self._made

    def forget(self) -> None:
        """Read all credentials again before the next request. Requests under way keep their client."""
        with self._lock:
            self._made = None

    def close(self) -> None:
        """Release connections; requests from now on fail."""
        with self._lock:
            self._closed = True
            if self._made is not None:
                self._made.close()


class Interrupted(BaseException):
    """Carries what a body's ``read`` raised past urllib3 and botocore, which would wrap an ``Exception`` and send again."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Outgoing:
    """A slice as botocore sends it. Raises nothing but ``Interrupted``."""

    def __init__(self, body: FileSlice) -> None:
        self._body = body

    def __len__(self) -> int:
        return self._body.size_bytes

    def read(self, size: int = -1, /) -> bytes:
        """Return the next block, up to ``SEND_BLOCK_BYTES`` whatever ``size``: urllib3 asks for what suits small bodies."""
        try:
            return self._body.read(max(size, SEND_BLOCK_BYTES))
        except Exception as error:
            raise Interrupted(error) from error

    def read_all(self) -> bytes:
        """Return what is left."""
        return b"".join(iter(self.read, b""))

    def crc64nvme_ahead(self) -> int:
        """Return the checksum of all that will be sent."""
        try:
            return self._body.crc64nvme_ahead()
        except Exception as error:
            raise Interrupted(error) from error

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Rewind, to send again."""
        return self._body.seek(offset, whence)

    def tell(self) -> int:
        """Return how much was read."""
        return self._body.tell()


def _make_client(options: S3Options, secrets: Sequence[str | None]) -> S3Client:
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # who calls knows better when and how often
        max_pool_connections=options.concurrency + 4,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="checkpoint-sidecar",
        s3={"payload_signing_enabled": False, "addressing_style": "path" if options.endpoint_url else "auto"},
    )
    key_id, secret, token = secrets if secrets else (None, None, None)
    client: S3Client = boto3.session.Session().client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or ("us-east-1" if options.endpoint_url else None),
        verify=_trusted(options),
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        aws_session_token=token,
        config=config,
    )
    client.meta.events.register("needs-retry.s3", _again_in_s)  # type: ignore[arg-type]
    client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    client.meta.events.register_last("before-call.s3", _send_small_bodies_at_once)
    _wait_longer_for_sending(client, options.read_timeout_s)
    return client


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
    return 0.2 if response is not None and response[0].status_code in (500, 502, 503, 504) else None


def _add_md5(params: dict[str, Any], **_: object) -> None:
    # botocore sends a CRC32 only, and stores that are older than that insist on this header.
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _send_small_bodies_at_once(params: dict[str, Any], **_: object) -> None:
    # Bytes, which botocore has made a BytesIO of. Waiting for "100 Continue" would take longer than sending them.
    if isinstance(params.get("body"), io.BytesIO):
        params["headers"].pop("Expect", None)


def _wait_longer_for_sending(client: S3Client, stall_s: float) -> None:
    """urllib3 sends on a new connection under the connect timeout: a slow link would break at its first blocks."""

    class Connection(AWSHTTPConnection):
        def connect(self) -> None:
            super().connect()
            self.sock.settimeout(stall_s)

    class TlsConnection(AWSHTTPSConnection):
        def connect(self) -> None:
            super().connect()
            self.sock.settimeout(stall_s)

    class Pool(AWSHTTPConnectionPool):
        ConnectionCls = Connection

    class TlsPool(AWSHTTPSConnectionPool):
        ConnectionCls = TlsConnection

    # botocore has no setting for it. A test fails when a release moves these.
    client._endpoint.http_session._pool_classes_by_scheme.update(http=Pool, https=TlsPool)  # type: ignore[attr-defined]


def _read_secrets(folder: Path | None) -> tuple[str | None, ...]:
    if folder is None:
        return ()
    return tuple((folder / name).read_text().strip() or None if (folder / name).is_file() else None for name in _SECRETS)
