"""The S3 servers that faults are injected before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.bucket import Bucket, checkpoint_files
from tests.process.conftest import moto_process as moto_process
from tests.process.sidecar_process import sidecar, write_checkpoint
from tests.servers import REAL_STORES


@pytest.fixture(params=["moto", "checking", *REAL_STORES])
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """moto compares nothing, but its etags are MD5s; "checking" compares CRC64NVME as AWS does; RGW compares MD5s,
    MinIO SHA-256 and CRCs."""
    made = Bucket(request.getfixturevalue(f"{request.param}_endpoint"))
    yield made
    made.close()


@pytest.fixture(params=["moto", *REAL_STORES])
def plain_bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """Where it does not matter what the server compares."""
    made = Bucket(request.getfixturevalue(f"{request.param}_endpoint"))
    yield made
    made.close()


@pytest.fixture
def moto_bucket(moto_endpoint: str) -> Iterator[Bucket]:
    made = Bucket(moto_endpoint)
    yield made
    made.close()


@pytest.fixture
def checking_bucket(checking_endpoint: str) -> Iterator[Bucket]:
    """Where damaged bodies are refused."""
    made = Bucket(checking_endpoint)
    yield made
    made.close()


@pytest.fixture(scope="session", params=["moto", *REAL_STORES])
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A run with ``checkpoint-1``, that was uploaded without trouble and that nobody changes."""
    made = Bucket(request.getfixturevalue(f"{request.param}_endpoint"))
    with sidecar(tmp_path_factory.mktemp("filled") / "volume", made.settings()) as running:
        write_checkpoint(running.volume, "checkpoint-1", checkpoint_files())
        running.committed("checkpoint-1", timeout_s=60)
    yield made
    made.close()
