"""Property tests have no time limit for a single example. ``CKPT_TEST_EXAMPLES``: how many each gets, unless it says so itself.

Servers are shared, Ceph RGW and MinIO by all processes of the run: each is started once, when the first test asks for it.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests import servers
from tests.network import Network, is_required, why_not

EXAMPLES = int(os.environ.get("CKPT_TEST_EXAMPLES", "25"))
settings.register_profile("project", max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected, of which nothing is garbage
    if not _is_worker(config):
        os.environ[servers.SHARED] = tempfile.mkdtemp(prefix="servers-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        servers.down_shared()


def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of collected tests: with its usual thresholds it takes a fifth of all time.

    No test module may import PyTorch: each process of the run would do it (``tests/lazy.py``).
    """
    if "torch" in sys.modules:
        raise pytest.UsageError("a test module imports torch: use tests.lazy.LazyModule")
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which ends the shared servers."""
    return hasattr(config, "workerinput")


@pytest.fixture(autouse=True, scope="session")
def _no_settings_of_this_machine() -> Iterator[None]:
    """Tests must not find, or send to, whatever S3 the developer's machine is set up for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_CA_BUNDLE"):
            patch.delenv(name, raising=False)
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        yield


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    with servers.moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def rgw_endpoint() -> str:
    if not servers.rgw_is_installed():
        _cannot_run("RGW", "radosgw is not installed: see tests/rgw/up")
    return servers.rgw()


@pytest.fixture(scope="session")
def minio_endpoint() -> str:
    if not servers.minio_is_built():
        _cannot_run("MINIO", "MinIO is not built: tests/cluster/build minio")
    return servers.minio()


@pytest.fixture(scope="session")
def cephfs() -> tuple[Path, Path]:
    """Two mounts of one CephFS."""
    if (reason := servers.why_no_cephfs()) is not None:
        _cannot_run("CEPHFS", reason)
    return servers.cephfs()


@pytest.fixture(params=servers.REAL_STORES)
def real_endpoint(request: pytest.FixtureRequest) -> str:
    """A server that checks credentials, which moto does not."""
    endpoint: str = request.getfixturevalue(f"{request.param}_endpoint")
    return endpoint


def _cannot_run(server: str, reason: str) -> None:
    if servers.is_required(server):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def network() -> Iterator[Network]:
    """Network namespaces for pods."""
    if (reason := why_not()) is not None:
        if is_required():
            pytest.fail(reason)
        pytest.skip(reason)
    with Network().up() as network:
        yield network


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that runs inside a test configures the log of the whole process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def checking_endpoint(moto_endpoint: str) -> Iterator[str]:
    """An S3 server that compares CRC64NVME, as AWS does."""
    with servers.Proxy(moto_endpoint, servers.ChecksumRule()).running() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def credentials_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return servers.write_credentials(tmp_path_factory.mktemp("secret"))
