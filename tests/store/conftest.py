"""Every store behind one fixture, so that each fact is tested on all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.store.file.store import FileStore
from sidecar.store.protocol import Capabilities, Part, Store, Verification
from sidecar.store.s3.store import S3Options, S3Store
from sidecar.store.slice import FileSlice, Gate, OpenGate
from tests import servers
from tests.marks import slow
from tests.store.memory import MemoryStore

BUCKET = "tests"


@dataclass
class Backend:
    """One kind of store. ``open`` returns a store at another prefix of the same bucket or volume."""

    kind: str
    open: Callable[[str], Store]
    sends_bodies_by: str = ""
    is_shared_folder: bool = False


BOTO3 = "-boto3"
"""Ending of the kinds whose bodies are sent and received by boto3."""
SERVERS = ["memory", "file", servers.ON_CEPHFS, "checking", *slow("moto"), *servers.REAL_STORES]
KINDS = [
    *SERVERS,
    *slow(f"checking{BOTO3}"),
    pytest.param(f"rgw{BOTO3}", marks=pytest.mark.rgw),
    pytest.param(f"minio{BOTO3}", marks=pytest.mark.minio),
]
ON_EACH_SERVER = pytest.mark.parametrize("backend", SERVERS, indirect=True)
"""For tests that neither send nor receive a body, which boto3 does in the other kinds."""
ON_EACH_LISTING = pytest.mark.parametrize("backend", ["memory", "file", "moto", *servers.REAL_STORES], indirect=True)
"""For tests of the pages of a list: another folder, checksums or boto3 change nothing about them."""


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    kind: str = request.param
    opened: list[Store] = []
    if kind == "memory":
        yield Backend(kind, lambda prefix: MemoryStore(f"memory://{prefix}"))
        return
    if kind in ("file", "cephfs"):
        folder = tmp_path if kind == "file" else request.getfixturevalue("cephfs")[0] / uuid.uuid4().hex
        yield Backend("file", lambda prefix: FileStore(folder / "volume" / prefix), is_shared_folder=kind == "cephfs")
        return
    server = kind.removesuffix(BOTO3)
    endpoint = request.getfixturevalue(f"{server}_endpoint")
    _make_bucket(endpoint)
    run = uuid.uuid4().hex
    secret = request.getfixturevalue("credentials_dir")

    def open_s3(prefix: str) -> Store:
        place = {"bucket": BUCKET, "prefix": f"{run}/{prefix}", "endpoint_url": endpoint, "credentials_dir": secret}
        store = S3Store(S3Options(**place, client="wire" if server == kind else "boto3"))
        opened.append(store)
        return store

    yield Backend(server, open_s3, sends_bodies_by="wire" if server == kind else "boto3")
    for store in opened:
        store.close()


_made: set[str] = set()


def _make_bucket(endpoint: str) -> None:
    if endpoint not in _made:
        servers.create_bucket(endpoint, BUCKET)
        _made.add(endpoint)


_probed: dict[tuple[str, str], tuple[S3Store, Capabilities]] = {}


@pytest.fixture
def opened(backend: Backend) -> tuple[Store, Capabilities]:
    store, kind = backend.open("run"), (backend.kind, backend.sends_bodies_by)
    if not isinstance(store, S3Store):
        return store, store.probe()
    if kind not in _probed:
        _probed[kind] = store, store.probe()
    # What a probe leaves behind, without its dozen requests for each test. test_verification.py tests probes.
    first, capabilities = _probed[kind]
    store.verification, store.crc_with_parts = first.verification, first.crc_with_parts
    store.md5_with_bodies, store._takes_conditions = first.md5_with_bodies, first._takes_conditions
    return store, capabilities


@pytest.fixture
def store(opened: tuple[Store, Capabilities]) -> Store:
    return opened[0]


class Source:
    """Makes slices of files for a store, and checks them as the uploader does."""

    def __init__(self, folder: Path, verification: Verification) -> None:
        self._folder = folder
        self._with_md5 = verification is Verification.MD5

    @contextmanager
    def of(
        self, content: bytes, *, offset: int = 0, size_bytes: int | None = None, gate: Gate | None = None
    ) -> Iterator[FileSlice]:
        path = self._folder / uuid.uuid4().hex
        path.write_bytes(content)
        with path.open("rb", buffering=0) as file:
            length = len(content) - offset if size_bytes is None else size_bytes
            yield FileSlice(
                file.fileno(), offset, length, gate=gate or OpenGate(), name="checkpoint-1/file", with_md5=self._with_md5
            )

    def put(self, store: Store, key: str, content: bytes) -> None:
        with self.of(content) as body:
            store.put_file(key, body)

    def part(self, store: Store, key: str, upload_id: str, number: int, content: bytes) -> Part:
        with self.of(content) as body:
            return store.upload_part(key, upload_id, number, body)


@pytest.fixture
def source(opened: tuple[Store, Capabilities], tmp_path: Path) -> Source:
    folder = tmp_path / "trainer"
    folder.mkdir()
    return Source(folder, opened[1].verification)


def read_all(store: Store, key: str, **options: object) -> bytes:
    content, buffer = b"", memoryview(bytearray(65_537))
    with store.read(key, **options) as body:  # type: ignore[arg-type]
        while count := body.readinto(buffer):
            content += bytes(buffer[:count])
    return content
