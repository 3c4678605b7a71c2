"""The stores that the process tests run against: a folder, and real S3 servers."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidecar.core.format import keys
from sidecar.daemon.settings import from_environment
from sidecar.store.opening import open_from
from sidecar.store.protocol import Store
from tests import servers
from tests.marks import slow
from tests.ports import free_port
from tests.process.sidecar_process import until

BUCKET = "process-tests"


class S3Server:
    """A running S3 server."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def settings(self, *, prefix: str) -> dict[str, str]:
        """Return what a sidecar needs to use it."""
        return {
            "CKPT_STORE": f"s3://{BUCKET}/{prefix}",
            "AWS_S3_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_DEFAULT_REGION": servers.REGION,
        }


class MotoProcess(S3Server):
    """A moto server that a test may stop, pause and start again on its port. It starts with an empty memory."""

    def __init__(self) -> None:
        self._port = free_port()
        super().__init__(f"http://127.0.0.1:{self._port}")
        self.start()

    def start(self) -> None:
        self._process = servers.start_moto(self._port)
        until(self._has_bucket, what="moto up")

    def _has_bucket(self) -> bool:
        try:
            servers.create_bucket(self.endpoint, BUCKET)
        except Exception:
            return False
        return True

    def pause(self) -> None:
        """Let it hang: connections stay open, nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it answer again after ``pause``."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def moto_server(moto_endpoint: str) -> S3Server:
    servers.create_bucket(moto_endpoint, BUCKET)
    return S3Server(moto_endpoint)


@pytest.fixture(scope="session")
def rgw_server(rgw_endpoint: str) -> S3Server:
    servers.create_bucket(rgw_endpoint, BUCKET)
    return S3Server(rgw_endpoint)


@pytest.fixture(scope="session")
def minio_server(minio_endpoint: str) -> S3Server:
    servers.create_bucket(minio_endpoint, BUCKET)
    return S3Server(minio_endpoint)


@pytest.fixture(params=servers.REAL_STORES)
def real_server(request: pytest.FixtureRequest) -> S3Server:
    """A server that checks credentials, which moto does not."""
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture
def moto_process() -> Iterator[MotoProcess]:
    server = MotoProcess()
    yield server
    server.stop()


@dataclass(frozen=True)
class Place:
    """Where a run's checkpoints go: the settings of its sidecars, and the store itself to look into or to damage."""

    settings: dict[str, str]
    store: Store

    def keys(self, prefix: str = "") -> list[str]:
        return [stored.key for stored in self.store.list(prefix)]

    def read(self, key: str) -> bytes:
        """Return an object, however large: ``Store.get`` is for documents."""
        return self.store.get(key, most_bytes=1 << 30)

    def unfinished_uploads(self) -> list[str]:
        """Return the keys of multipart uploads that were begun and not ended, without those of start-up probes.

        A probe that is killed leaves one, which a later life aborts once it is an hour old.
        """
        return [pending.key for pending in self.store.pending_uploads("") if not pending.key.startswith(keys.PROBE)]


ON_ONE_STORE = pytest.mark.parametrize("place", ["file", *slow("moto")], indirect=True)
"""For what is decided on the volume or in the queue, and is the same for all stores."""
ON_EACH_KIND = pytest.mark.parametrize("place", ["file", "moto", *servers.REAL_STORES], indirect=True)
"""For the main paths, which `make test` runs on S3, too."""


@pytest.fixture(params=["file", *slow("moto"), *servers.REAL_STORES])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "file":
        settings = {"CKPT_STORE": f"file://{tmp_path / 'store'}"}
    else:
        server: S3Server = request.getfixturevalue(f"{request.param}_server")
        settings = server.settings(prefix=f"run-{uuid.uuid4().hex[:8]}")
        for name, value in settings.items():
            if name.startswith("AWS_"):
                monkeypatch.setenv(name, value)
    store = open_from(from_environment(settings))
    yield Place(settings, store)
    store.close()
