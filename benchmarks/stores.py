"""The S3 servers that transfers go to: the sink, the sink over TLS or behind a link, and Ceph RGW."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.native import built

KINDS = ("sink", "sink-tls", "rgw", "link")
BUCKET = "bench"
LINK_MBIT_PER_S, LINK_ROUND_TRIP_MS = 1000, 30
ACCESS = {"AWS_ACCESS_KEY_ID": "minioadmin", "AWS_SECRET_ACCESS_KEY": "minioadmin", "AWS_DEFAULT_REGION": "us-east-1"}
RGW = Path(__file__).parents[1] / "tests/rgw"
_CLONE_NEWNET = 0x40000000
_CREATE_BUCKET = "import boto3, sys; boto3.client('s3').create_bucket(Bucket=sys.argv[1])"
_REMOVE = "import boto3, sys; boto3.resource('s3').Bucket(sys.argv[1]).objects.filter(Prefix=sys.argv[2]).delete()"


@dataclass(frozen=True)
class StoreServer:
    """A running server, and the environment of its clients."""

    kind: str
    endpoint: str
    keeps: bool
    """Whether large objects can be read back."""
    certificates: Path | None = None
    ceph_conf: Path | None = None

    def client_environ(self) -> dict[str, str]:
        """Return the environment of a client: this access to the store and no other."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CKPT_", "RCLONE_", "S3_"))}
        trusted: dict[str, str] = {}
        if self.certificates:
            trusted = dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE"), str(self.certificates))
        nothing = {
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return kept | ACCESS | nothing | trusted | {"AWS_ENDPOINT_URL": self.endpoint}

    def remove(self, prefix: str) -> None:
        """Free the memory that uploads took; the sink discarded them."""
        if self.ceph_conf:
            self.administer(_REMOVE, BUCKET, prefix)
            collect = ["radosgw-admin", "gc", "process", "--include-all"]  # it would wait for hours
            subprocess.run(collect, env=os.environ | {"CEPH_CONF": str(self.ceph_conf)}, check=True, capture_output=True)

    def administer(self, code: str, *arguments: str) -> None:
        """Run a line of Python with boto3 in a process of its own: this one stays small, as children inherit its peak."""
        subprocess.run([sys.executable, "-c", code, *arguments], env=self.client_environ(), check=True)


@contextlib.contextmanager
def opened(kind: str, *, keep_in: Path | None = None, mbit_per_s: int | None = None) -> Iterator[StoreServer]:
    """Run a server for the length of the context.

    Args:
        kind: One of ``KINDS``.
        keep_in: Folder in which the sink keeps large objects; unset: it discards them.
        mbit_per_s: What the sink takes at most, or the rate of the link.
    """
    with contextlib.ExitStack() as stack:
        keeping = ["-k", str(keep_in)] if keep_in else []
        if kind == "rgw":
            yield stack.enter_context(_rgw())
        elif kind == "link":
            server, client = stack.enter_context(_namespaces(mbit_per_s or LINK_MBIT_PER_S))
            port = stack.enter_context(sink("-a", "10.99.0.1", *keeping, within=("ip", "netns", "exec", server)))
            stack.enter_context(_inside(client))
            yield StoreServer(kind, f"http://10.99.0.1:{port}", bool(keep_in))
        elif kind == "sink-tls":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            certificate, key = _certificate(folder)
            port = stack.enter_context(sink(*keeping, "-t", str(certificate), str(key)))
            yield StoreServer(kind, f"https://127.0.0.1:{port}", bool(keep_in), certificate)
        else:
            limit = ["-r", str(mbit_per_s)] if mbit_per_s else []
            yield StoreServer(kind, f"http://127.0.0.1:{stack.enter_context(sink(*keeping, *limit))}", bool(keep_in))


@contextlib.contextmanager
def sink(*options: str, within: tuple[str, ...] = ()) -> Iterator[int]:
    """Run the sink and yield its port."""
    with _running([*within, str(built("sink")), *options]) as said:
        yield int(said)


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[str]:
    """Run a program that prints one line when it is ready, and yield the line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not (said := process.stdout.readline()):
            raise SystemExit(f"{command[0]} ended with exit code {process.wait()}")
        yield said
    finally:
        process.terminate()
        process.wait()


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    # rustls does not take a server's certificate that says it is an authority.
    extensions = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
    names = ("-subj", "/CN=sink", *extensions, "-days", "30")
    kind = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    subprocess.run(["openssl", *kind, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def _rgw() -> Iterator[StoreServer]:
    with tempfile.TemporaryDirectory() as folder:
        up = subprocess.run([str(RGW / "up"), folder, str(free_port()), "8"], stdout=subprocess.PIPE, text=True, check=False)
        if up.returncode:
            raise SystemExit("Ceph RGW did not start: apt-get install ceph-mon ceph-osd ceph-mgr ceph-common radosgw curl")
        try:
            store = StoreServer("rgw", up.stdout.strip(), keeps=True, ceph_conf=Path(folder, "ceph.conf"))
            store.administer(_CREATE_BUCKET, BUCKET)
            yield store
        finally:
            subprocess.run([str(RGW / "down"), folder], check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _namespaces(mbit_per_s: int) -> Iterator[tuple[str, str]]:
    """Yield the names of a server's and a client's network namespace with the link between them."""
    for is_there, what in (
        (os.geteuid() == 0, "root"),
        (Path("/dev/net/tun").exists(), "/dev/net/tun"),
        (shutil.which("ip"), "ip (apt-get install iproute2)"),
    ):
        if not is_there:
            raise SystemExit(f"--store link needs {what}")
    names = tuple(f"bench-{os.getpid()}-{side}" for side in ("server", "client"))
    shape = (str(LINK_ROUND_TRIP_MS / 2), str(mbit_per_s))
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        with _running([str(built("wanlink")), names[0], "10.99.0.1", names[1], "10.99.0.2", *shape]):
            yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """Enter a network namespace, also for all processes that are started meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as before, Path("/var/run/netns", namespace).open() as inside:
        if libc.setns(inside.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
        try:
            yield
        finally:
            libc.setns(before.fileno(), _CLONE_NEWNET)
