"""S3 servers for tests: moto, Ceph RGW, and small ones that misbehave on purpose."""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import hashlib
import http.client
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from sidecar.core.format.checksum import checksum, combined
from tests.ports import free_port, served

ACCESS_KEY, SECRET_KEY = "minioadmin", "minioadmin"
REGION = "us-east-1"
RGW = Path(__file__).parent / "rgw"
MINIO = Path(__file__).parent / "minio"
CEPHFS = Path(__file__).parent / "cephfs"
ON_RGW, ON_MINIO = pytest.param("rgw", marks=pytest.mark.rgw), pytest.param("minio", marks=pytest.mark.minio)
ON_CEPHFS = pytest.param("cephfs", marks=pytest.mark.rgw)
SHARED = "CKPT_TEST_SERVERS"
"""Environment variable of a test run's processes: the folder of the servers that they share."""
REAL_STORES = [ON_RGW, ON_MINIO]
"""S3 servers that people run, for parameters: ``["moto", *REAL_STORES]``."""


def write_credentials(folder: Path, *, access_key: str = ACCESS_KEY, secret_key: str = SECRET_KEY) -> Path:
    """Write what a mounted secret looks like."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "AWS_ACCESS_KEY_ID").write_text(access_key)
    (folder / "AWS_SECRET_ACCESS_KEY").write_text(secret_key + "\n")
    return folder


def create_bucket(endpoint: str, bucket: str) -> None:
    """Create a bucket, unless another process of the test run did."""
    client = s3_client(endpoint)
    with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=bucket)
    client.close()


def archive(endpoint: str, bucket: str, key: str) -> None:
    """Move an object to another storage class, as a lifecycle rule does: it is there, and is not given out."""
    client = s3_client(endpoint)
    client.copy_object(Bucket=bucket, Key=key, CopySource={"Bucket": bucket, "Key": key}, StorageClass="GLACIER")
    client.close()


def s3_client(endpoint: str) -> Any:
    """Return boto3's client of a server, with the keys of its owner."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY, region_name=REGION
    )


def start_moto(port: int) -> subprocess.Popen[bytes]:
    """Start a moto server, in a session of its own: the kernel shares the cores between sessions, and tests wait for it."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("moto_server.py")), str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Yield the endpoint of a moto server in a process of its own."""
    port = free_port()
    server = start_moto(port)
    try:
        _wait_for(port, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def rgw() -> str:
    """Return the endpoint of the Ceph RGW of this test run."""
    return _shared(RGW, timeout_s=100)


def create_rgw_user(name: str, *, secret_key: str) -> None:
    """Create a user of the Ceph RGW of this test run, who may do nothing yet; the access key is the name."""
    command = ["radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}", f"--access-key={name}"]
    environ = {**os.environ, "CEPH_CONF": str(Path(os.environ[SHARED]) / RGW.name / "ceph.conf")}
    subprocess.run([*command, f"--secret-key={secret_key}"], check=True, capture_output=True, env=environ, timeout=60)


def minio() -> str:
    """Return the endpoint of the MinIO of this test run."""
    return _shared(MINIO, timeout_s=60)


def cephfs() -> tuple[Path, Path]:
    """Return the mounts of the CephFS of this test run, as two nodes have them."""
    folder = Path(_shared(CEPHFS, timeout_s=150))
    return folder / "node-0", folder / "node-1"


def _shared(scripts: Path, *, timeout_s: int) -> str:
    """Start a server once for all processes of the test run; ``down_shared`` ends it."""
    folder = Path(os.environ[SHARED]) / scripts.name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (started := folder.with_suffix(".endpoint")).exists():
            return started.read_text()
        address = f"127.0.0.1:{free_port()}" if scripts == MINIO else str(free_port(in_a_row=3))
        command = [scripts / "up", folder, address]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"{scripts.name}/up: {done.stdout}{done.stderr[-2000:]}")
        endpoint = done.stdout.split()[-1]
        started.write_text(endpoint)
        return endpoint


def down_shared() -> None:
    """End the servers of this test run."""
    folder = Path(os.environ[SHARED])
    for scripts in (RGW, MINIO, CEPHFS):
        subprocess.run([scripts / "down", folder / scripts.name], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def rgw_is_installed() -> bool:
    return shutil.which("radosgw") is not None


def why_no_cephfs() -> str | None:
    """Return why CephFS cannot be mounted here; ``None``: it can."""
    if not (rgw_is_installed() and shutil.which("ceph-mds") and shutil.which("ceph-fuse")):
        return "ceph-mds or ceph-fuse is not installed: see tests/cephfs/up"
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        return "mounting CephFS needs root and /dev/fuse"
    return None


def minio_is_built() -> bool:
    cache = Path(os.environ.get("CKPT_CLUSTER_CACHE") or Path.home() / ".cache/cluster")
    return os.access(os.environ.get("MINIO") or cache / "bin/minio", os.X_OK)


def is_required(server: str) -> bool:
    """Whether a test fails where ``server`` (``RGW``, ``MINIO``, ``CEPHFS``) cannot run."""
    return bool(os.environ.get("CI")) or os.environ.get(f"CKPT_TEST_{server}") == "required"


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError("moto did not start: run 'python -m moto.server' to see why")


@dataclass
class Request:
    """What a client sent to a ``Proxy``; a rule may change it before it is passed on."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber" in self.query

    @property
    def creates_object(self) -> bool:
        return (self.method == "PUT" and not self.is_part) or (self.method == "POST" and "uploads" in self.query)


ProxyAnswer = tuple[int, dict[str, str], bytes]
Rule = Callable[[Request], ProxyAnswer | None]


def s3_error(status: int, code: str, *, message: str = "no", **headers: str) -> ProxyAnswer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return status, {"Content-Type": "application/xml", **headers}, body


@dataclass
class Proxy:
    """Stands before an S3 server, or alone. ``rule`` answers a request itself, or changes it, or lets it pass."""

    target: str | None = None
    rule: Rule = lambda _: None
    cut_answers_at: int | None = None
    """Answers to GET are cut after this number of bytes of their body."""
    tls: ssl.SSLContext | None = None
    seen: list[Request] = field(default_factory=list)
    in_flight: list[Request] = field(default_factory=list)
    """Requests that the rule or the server has not answered yet."""

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        if self.tls:
            server.socket = self.tls.wrap_socket(server.socket, server_side=True)
        with served(server):
            yield f"{'https' if self.tls else 'http'}://127.0.0.1:{server.server_address[1]}"

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - 'self' is the handler's below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(self.command, self.path, dict(self.headers.items()), body)
                proxy.seen.append(request)
                proxy.in_flight.append(request)
                try:
                    status, headers, content = proxy.rule(request) or proxy._pass_on(request)
                finally:
                    proxy.in_flight.remove(request)
                self._answer(status, headers, content)

            def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = headers.get("Content-Length", str(len(content))) if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command == "GET" and proxy.cut_answers_at is not None and len(content) > proxy.cut_answers_at:
                    self.wfile.write(content[: proxy.cut_answers_at])
                    self.close_connection = True
                elif self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 - the base class's names

        return Handler

    def _pass_on(self, request: Request) -> ProxyAnswer:
        if self.target is None:
            return s3_error(501, "NotImplemented")
        with contextlib.closing(http.client.HTTPConnection(urlsplit(self.target).netloc, timeout=60)) as connection:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in ("expect", "connection")}
            connection.request(request.method, request.path, body=request.body, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()


class ChecksumRule:
    """Compares CRC64NVME as AWS S3 does, which no free server at hand does.

    ``wants_parts``: an upload that was begun with a checksum takes no part without one, and this is the code of the error.
    """

    def __init__(self, *, wants_parts: str | None = None) -> None:
        self._wants_parts = wants_parts
        self._lock = threading.Lock()
        self._parts: dict[str, dict[tuple[int, str], tuple[int, int]]] = {}
        """Checksum and size of each part that was sent, by number and etag: of two requests, the answered one counts."""

    def __call__(self, request: Request) -> ProxyAnswer | None:
        sent = request.headers.get("x-amz-checksum-crc64nvme")
        if request.method == "PUT":
            crc = checksum(request.body)
            if sent is not None and sent != _base64(crc):
                return s3_error(400, "BadDigest", message="The CRC64NVME you specified did not match the calculated checksum.")
            if request.is_part:
                if sent is None and self._wants_parts:
                    return s3_error(400, self._wants_parts, message="Checksum Type mismatch occurred.")
                with self._lock:
                    parts = self._parts.setdefault(request.query["uploadId"], {})
                    parts[int(request.query["partNumber"]), hashlib.md5(request.body).hexdigest()] = crc, len(request.body)
        elif request.method == "POST" and "uploadId" in request.query:
            numbers = [int(found) for found in re.findall(rb"<PartNumber>(\d+)</PartNumber>", request.body)]
            etags = [found.decode() for found in re.findall(rb"<ETag>\W*(?:quot;)?([0-9a-f]{32})\b", request.body)]
            named = list(zip(numbers, etags, strict=True))
            with self._lock:
                parts = self._parts.get(request.query["uploadId"], {})
                is_known = sent is not None and all(part in parts for part in named)
                if is_known and sent != _base64(combined(parts[part] for part in named)):
                    return s3_error(400, "BadDigest", message="The CRC64NVME of the whole did not match.")
        return None


def compare_hashes(request: Request) -> ProxyAnswer | None:
    """Compare the signed SHA-256 of bodies, as Ceph RGW and MinIO do."""
    signed = request.headers.get("X-Amz-Content-SHA256", "UNSIGNED-PAYLOAD")
    if request.method == "PUT" and signed not in ("UNSIGNED-PAYLOAD", hashlib.sha256(request.body).hexdigest()):
        return s3_error(400, "XAmzContentSHA256Mismatch")
    return None


def object_lock(request: Request) -> ProxyAnswer | None:
    """Refuse what AWS refuses where Object Lock has a default retention: a body without a checksum in its headers."""
    sent = {name.lower() for name in request.headers}
    names = {"content-md5"} | {f"x-amz-checksum-{name}" for name in ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")}
    if request.method != "PUT" or "x-amz-copy-source" in sent or names & sent:
        return None
    text = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
    return s3_error(400, "InvalidRequest", message=text)


def wants_acl(request: Request) -> ProxyAnswer | None:
    """Refuse objects as a bucket's policy does that leaves them to the bucket's owner."""
    return _denied_without(request, "x-amz-acl", "bucket-owner-full-control") if request.creates_object else None


def wants_encryption(request: Request) -> ProxyAnswer | None:
    """Refuse objects as a bucket's policy does that wants them encrypted."""
    return _denied_without(request, "x-amz-server-side-encryption", "AES256") if request.creates_object else None


def requester_pays(request: Request) -> ProxyAnswer | None:
    """Refuse every request that nobody pays for."""
    return _denied_without(request, "x-amz-request-payer", "requester")


def _denied_without(request: Request, name: str, value: str) -> ProxyAnswer | None:
    sent = {header.lower(): text for header, text in request.headers.items()}
    return None if sent.get(name) == value else s3_error(403, "AccessDenied", message="Access Denied")


def _base64(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Yield the endpoint of a server that takes connections and never says a word."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def self_signed(folder: Path, *, from_days: int = 0, to_days: int = 2) -> tuple[ssl.SSLContext, Path]:
    """Return the TLS context of a server on 127.0.0.1, and the certificate that a client must trust.

    ``from_days``, ``to_days``: when it is valid, in days from now.
    """
    certificate, key = folder / "cert.pem", folder / "key.pem"
    key_type = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-subj", "/CN=store", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-days", "2", *key_type, *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    if (from_days, to_days) != (0, 2):
        _date(certificate, key, from_days, to_days)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


def _date(certificate: Path, key: Path, from_days: int, to_days: int) -> None:
    """Sign a certificate again, valid at another time: openssl has no option for that before 3.4."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    found, now = x509.load_pem_x509_certificate(certificate.read_bytes()), datetime.datetime.now(datetime.timezone.utc)
    signer = serialization.load_pem_private_key(key.read_bytes(), None)
    made = x509.CertificateBuilder(found.issuer, found.subject, signer.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now + datetime.timedelta(days=from_days)).not_valid_after(
        now + datetime.timedelta(days=to_days)
    )
    for extension in found.extensions:
        made = made.add_extension(extension.value, extension.critical)
    signed = made.sign(signer, hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
