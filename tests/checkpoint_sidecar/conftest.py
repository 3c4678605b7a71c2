"""A real ``TrainerClient`` of the package kubeflow."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.kubernetes.inject import Options
from tests.checkpoint_sidecar.api_server import Cluster, serve
from tests.deploy.schemas import KUBERNETES, documents
from tests.lazy import LazyModule

if TYPE_CHECKING:
    from kubeflow.trainer import TrainerClient

sdk, api = LazyModule("kubeflow.trainer"), LazyModule("kubernetes.client")


@pytest.fixture(autouse=True, scope="session")
def _imported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the SDK's models are written for an older pydantic
        importlib.import_module("kubeflow.trainer")


def plain_runtime() -> dict[str, Any]:
    [runtime] = documents((KUBERNETES / "plain/runtime.yaml").read_text())
    return runtime | {"metadata": runtime["metadata"] | {"name": "torch-distributed"}}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serve(Cluster(plain_runtime(), webhook=Options(image="registry.example/checkpoint-sidecar:1"))) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> TrainerClient:
    configuration = api.Configuration(host=cluster.url)
    configuration.retries = 0
    return sdk.TrainerClient(sdk.KubernetesBackendConfig(namespace="research", client_configuration=configuration))
