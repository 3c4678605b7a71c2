"""A real ``TrainerClient`` of the package kubeflow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the SDK's models are written for an older pydantic
    from kubeflow.trainer import KubernetesBackendConfig, TrainerClient
from kubernetes.client import Configuration

from sidecar.kubernetes.inject import Options
from tests.checkpoint_sidecar.api_server import Cluster, serve
from tests.deploy.schemas import KUBERNETES, documents


def plain_runtime() -> dict[str, Any]:
    [runtime] = documents((KUBERNETES / "plain/runtime.yaml").read_text())
    return runtime | {"metadata": runtime["metadata"] | {"name": "torch-distributed"}}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serve(Cluster(plain_runtime(), webhook=Options(image="registry.example/checkpoint-sidecar:1"))) as found:
        yield found


@pytest.fixture
def client(cluster: Cluster) -> TrainerClient:
    configuration = Configuration(host=cluster.url)
    configuration.retries = 0
    return TrainerClient(KubernetesBackendConfig(namespace="research", client_configuration=configuration))
