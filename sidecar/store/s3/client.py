"""Access to a bucket: control plane, bodies and the transports below, with timeouts, trust and rotating credentials."""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from urllib.parse import urlsplit

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from sidecar.errors import AccessRefused, StoreUnavailable, UntrustedStore
from sidecar.store.http.proxy import is_exempt
from sidecar.store.http.wire import Wire
from sidecar.store.s3.attempt import origin_of
from sidecar.store.s3.bodies import BodyRequests, WireRequests
from sidecar.store.s3.control import Control
from sidecar.store.s3.credentials import Frozen, fetch_credentials, new_session, read_secrets
from sidecar.store.s3.errors import UnusableSettings, translated
from sidecar.store.s3.loop import CLOSED, LoopThread
from sidecar.store.s3.signing import Signer
from sidecar.store.s3.transport import Transport

P = ParamSpec("P")
T = TypeVar("T")

Addressing = Literal["path", "virtual", "auto"]
SECRET_POLL_S = 5.0
PAYER_HEADER = "x-amz-request-payer"


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
    acl: str | None = None
    """Canned ACL of every object."""
    request_payer: str | None = None
    """Who pays for requests, sent with each of them."""
    concurrency: int = 4
    verify: Literal["auto", "md5", "read-back", "off"] = "auto"
    credentials_dir: Path | None = None
    client: Literal["wire", "boto3"] = "wire"
    """What sends and receives bodies."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    """Longest wait for an answer, and for progress of a body."""


@dataclass(frozen=True, slots=True)
class Access:
    """Control plane and bodies of one set of credentials."""

    client: Any
    """aiobotocore's client."""
    control: Control
    bodies: BodyRequests
    wire: Wire


class Clients:
    """Holds the current ``Access``; replaces it when mounted credentials rotate, or after the store refused them.

    Blocking, thread-safe. Small requests run on an event loop of its own.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        """Of the fields, held for moments: termination notices wait for it. ``_making``: while an access is made."""
        self._making = threading.Lock()
        self._retired = 0
        """How often an access was given up."""
        self._loop = LoopThread()
        self._secrets: tuple[str | None, ...] = ()
        self._looked_s = 0.0
        self._made: Access | None = None
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()
        """Those in use, also by requests that began with earlier credentials."""
        self._closed = False
        self._hurried = False
        self._addressing: Addressing = "path" if options.endpoint_url else "auto"

    def ask(self, request: Callable[Concatenate[Control, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a request of the control plane on the event loop. Raises as it does.

        Raises:
            StoreUnavailable: The store was closed.
            Stopped: The call of this thread was cancelled.
        """
        return self._loop.run(request(self.current().control, *args, **kwargs))

    def pages(
        self, request: Callable[Concatenate[Control, P], AsyncIterator[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[T]:
        """Yield the pages of a listing of the control plane; each is requested when it is needed. Raises as ``ask``."""
        pages = aiter(request(self.current().control, *args, **kwargs))

        async def page() -> T | None:
            return await anext(pages, None)

        while (found := self._loop.run(page())) is not None:
            yield found

    def pause(self, seconds: float) -> None:
        """Wait. Raises as ``ask``."""
        self._loop.run(asyncio.sleep(seconds))

    @contextmanager
    def translated(self, name: str) -> Iterator[None]:
        """Translate errors of a request (``errors.translated``). After a refusal, credentials are read again."""
        try:
            with translated(name):
                yield
        except AccessRefused:
            self.forget()
            raise

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
            if (made := self._usable(time.monotonic())) is not None:
                return made
        with self._making:
            with self._lock:
                if (made := self._usable(now_s := time.monotonic())) is not None:  # another thread made it meanwhile
                    return made
                self._looked_s = now_s
            return self._renewed()

    def _usable(self, now_s: float) -> Access | None:
        """Return the access, or ``None`` if there is none, or mounted credentials are due to be read again."""
        if self._closed:
            raise StoreUnavailable(f"s3://{self._options.bucket}: {CLOSED}")
        is_due = self._options.credentials_dir and now_s - self._looked_s > SECRET_POLL_S
        return None if is_due else self._made

    def _renewed(self) -> Access:
        """Return the access by the present credentials. The service that gives them may be silent: no lock is held."""
        while True:
            secrets = read_secrets(self._options.credentials_dir)
            with self._lock:
                if self._made is not None and secrets == self._secrets:
                    return self._made
                self._retire()
                retired = self._retired
            made = self._make(secrets)
            with self._lock:
                if retired != self._retired:  # refused, or to be addressed otherwise, meanwhile
                    continue
                self._made, self._secrets = made, secrets
                self._wires.add(made.wire)
                made.wire.pulse.hurried = self._hurried
                if self._closed:
                    made.wire.close()
                return made

    def hurry(self, hurried: bool) -> None:
        """Hedge sooner after a termination notice (``True``), or as usual once the notice is withdrawn (``False``)."""
        with self._lock:
            self._hurried = hurried
            for wire in self._wires:
                wire.pulse.hurried = hurried

    def forget(self) -> None:
        """Read credentials and certificates again before the next request. Requests in flight keep theirs."""
        with self._lock:
            self._retire()

    def close(self) -> None:
        """Abort requests in flight; later ones fail."""
        with self._lock:
            self._closed = True
            made, wires = self._made, list(self._wires)
        for wire in wires:
            wire.close()
        if made is not None:
            made.bodies.close()
        self._loop.close()

    def _retire(self) -> None:
        if self._made is not None:
            self._made.wire.retire()
        self._made = None
        self._retired += 1

    def _make(self, secrets: Sequence[str | None]) -> Access:
        options, tls = self._options, _tls(self._options)
        wire = Wire(tls=tls, connect_timeout_s=options.connect_timeout_s, stall_s=options.read_timeout_s, proxy_of=_proxy_of)
        transport = Transport.of(wire, tls=tls, connect_timeout_s=options.connect_timeout_s)
        session = new_session(secrets, ca_bundle=options.ca_bundle)
        client, presigned = self._loop.run(_client(session, options, transport, self._addressing))
        client.meta.events.register("before-call.s3", _adding(_every_request(options)))
        control = Control(client, bucket=options.bucket, of_objects=_of_objects(options))
        # Its requests hold it: once it is gone, nobody uses the client.
        weakref.finalize(control, self._loop.at_end(client.close)).atexit = False
        frozen = Frozen(session, self._loop)
        return Access(client, control, self._bodies(frozen, client, presigned, wire), wire)

    def _bodies(self, frozen: Frozen, client: Any, presigned: str, wire: Wire) -> BodyRequests:
        options, region = self._options, client.meta.region_name
        if options.client == "wire":
            signer = Signer(frozen.credentials, presigned=presigned, region=region, every_request=_every_request(options))
            return WireRequests(signer, wire)
        from sidecar.store.s3.boto_bodies import BotoRequests

        direct: dict[str, Any] = {} if _proxy_of(origin_of(presigned)) else {"proxies": {}}  # by its own rules otherwise
        return BotoRequests(
            frozen.credentials,
            bucket=options.bucket,
            before_call=_adding(_every_request(options)),
            config=client_config(options, self._addressing, signs_payload=False) | direct,
            endpoint_url=options.endpoint_url,
            region_name=region,
            verify=_trusted(options),
        )


async def _client(
    session: AioSession, options: S3Options, transport: type[Transport], addressing: Addressing
) -> tuple[Any, str]:
    """Return a client, and its presigned URL for an object ``k``."""
    await fetch_credentials(session)
    creating = session.create_client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or ("us-east-1" if options.endpoint_url else None),
        config=AioConfig(http_session_cls=transport, **client_config(options, addressing, signs_payload=True)),
    )
    try:  # no request is made: what fails is a setting, also of a profile
        client = await creating.__aenter__()
        return client, await client.generate_presigned_url("get_object", Params={"Bucket": options.bucket, "Key": "k"})
    except (BotoCoreError, ValueError) as error:
        raise UnusableSettings(error=error) from error


def client_config(options: S3Options, addressing: Addressing, *, signs_payload: bool) -> dict[str, Any]:
    """Return the settings of a botocore client. The caller decides about retries. ``auto`` leaves it to the profile."""
    style = {} if addressing == "auto" else {"addressing_style": addressing}
    return {
        "connect_timeout": options.connect_timeout_s,
        "read_timeout": options.read_timeout_s,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": options.concurrency + 4,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": "checkpoint-sidecar",
        "s3": {"payload_signing_enabled": signs_payload, **style},
    }


def _of_objects(options: S3Options) -> dict[str, str]:
    """Return the parameters of every write that creates an object."""
    given = {"ServerSideEncryption": options.sse, "SSEKMSKeyId": options.sse_kms_key_id, "ACL": options.acl}
    return {name: value for name, value in given.items() if value}


def _every_request(options: S3Options) -> dict[str, str]:
    """Return the headers of every request, reads and lists too."""
    return {PAYER_HEADER: options.request_payer} if options.request_payer else {}


def _adding(headers: Mapping[str, str]) -> Callable[..., None]:
    """Return a handler of botocore that adds headers to a request before it is signed."""

    def before_call(params: dict[str, Any], **_: Any) -> None:
        params["headers"].update(headers)

    return before_call


def _tls(options: S3Options) -> ssl.SSLContext:
    """Return the context of all connections. Without a bundle of its own, it trusts the authorities that botocore trusts."""
    trusted = _trusted(options)
    if (options.endpoint_url or "").startswith("http:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used: reading the authorities would be in vain
    if trusted is False:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    bundle = str(trusted or os.environ.get("AWS_CA_BUNDLE") or get_cert_path(True))
    try:
        return ssl.create_default_context(cafile=bundle)
    except OSError as error:  # SSLError is one
        variable = "CKPT_CA_BUNDLE" if trusted else "AWS_CA_BUNDLE"
        raise UntrustedStore(
            f"{bundle}: no certificates can be read from it ({error.strerror or error}): correct {variable}"
        ) from None


@functools.lru_cache
def _proxy_of(origin: str) -> str | None:
    proxies: dict[str, str] = get_environ_proxies(origin)
    if is_exempt(urlsplit(origin).hostname or "", proxies.get("no", "")):
        return None
    return proxies.get(origin.partition(":")[0])


def _trusted(options: S3Options) -> bool | str | None:
    if not options.verify_tls:
        return False
    return str(options.ca_bundle) if options.ca_bundle else None  # None: AWS_CA_BUNDLE, else the system's
