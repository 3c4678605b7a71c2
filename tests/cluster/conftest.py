"""The cluster that KUBECONFIG names, a namespace for each test, and the store.

All that a test makes is in its namespace, or has its name; both go when the test ends.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.cluster.kubectl import Namespace, Object, Refused, apply, kubectl, until
from tests.cluster.settings import ClusterSettings, is_required, why_not
from tests.cluster.story import Story
from tests.cluster.workloads import Workloads, scripts, secret

LABEL = "checkpoint-sidecar/test"
_reports = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(420))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    item.stash[_reports] = item.stash.get(_reports, False) or report.failed
    return report


@pytest.fixture(scope="session")
def settings() -> ClusterSettings:
    if (reason := why_not()) is not None:
        pytest.fail(reason) if is_required() else pytest.skip(reason)
    return ClusterSettings()


@pytest.fixture(scope="session")
def nodes(settings: ClusterSettings) -> list[str]:
    """Names of the nodes on which pods can start."""
    found = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    return [
        node["metadata"]["name"] for node in found if not node["spec"].get("taints") and not node["spec"].get("unschedulable")
    ]


@pytest.fixture
def two_nodes(nodes: list[str]) -> list[str]:
    if len(nodes) < 2:
        pytest.skip("the cluster has one node")
    return nodes


@pytest.fixture(scope="session")
def resources(settings: ClusterSettings) -> set[str]:
    """Names of all kinds of objects that the cluster knows."""
    return set(kubectl("api-resources", "-o", "name", "--no-headers").split())


@pytest.fixture
def jobsets(resources: set[str]) -> None:
    _needs(resources, "jobsets.jobset.x-k8s.io", "JobSet")


@pytest.fixture
def trainer(resources: set[str]) -> None:
    _needs(resources, "trainjobs.trainer.kubeflow.org", "Kubeflow Trainer")


@pytest.fixture
def kueue(resources: set[str]) -> None:
    _needs(resources, "clusterqueues.kueue.x-k8s.io", "Kueue")


def _needs(resources: set[str], kind: str, name: str) -> None:
    if kind not in resources:
        pytest.skip(f"the cluster has no {name}")


@pytest.fixture
def torch(settings: ClusterSettings) -> None:
    if not settings.torch_image and not settings.torch_packages:
        pytest.skip("neither CKPT_CLUSTER_TORCH_IMAGE nor CKPT_CLUSTER_TORCH_PACKAGES is set")


@pytest.fixture(scope="session")
def bucket(settings: ClusterSettings) -> Iterator[Any]:
    """The bucket, which is made where it is missing. Other workers of pytest make it at the same time."""
    s3 = boto3.resource(
        "s3",
        endpoint_url=settings.endpoint or None,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        region_name=settings.region,
    )
    found = s3.Bucket(settings.bucket)
    if found.creation_date is None:
        with contextlib.suppress(s3.meta.client.exceptions.BucketAlreadyOwnedByYou):
            found.create()
    yield found
    s3.meta.client.close()


@pytest.fixture(scope="session")
def leaving(bucket: Any) -> Iterator[list[str]]:
    """Gets the names of namespaces that are being removed. They take some seconds, for which no test waits."""
    names: list[str] = []
    yield names
    for name in names:
        until_gone(name)
        bucket.objects.filter(Prefix=f"{name}/").delete()


@pytest.fixture
def namespace(
    request: pytest.FixtureRequest, settings: ClusterSettings, leaving: list[str], record_property: Any
) -> Iterator[Namespace]:
    """A namespace that allows what the restricted pod security standard allows (mark ``hostpath``: everything)."""
    level = "privileged" if "torch" in request.fixturenames and not settings.torch_image else "restricted"
    made = make_namespace(level)
    made.apply(secret(settings), scripts())
    yield made
    if request.node.stash.get(_reports, False):
        record_property("cluster", made.watch.report())
        print(made.watch.report())
    made.watch.close()
    leaving.append(made.name)
    remove_namespace(made.name)


def make_namespace(level: str) -> Namespace:
    name = f"ckpt-{uuid.uuid4().hex[:8]}"
    labels = {LABEL: "true", "pod-security.kubernetes.io/enforce": level}
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    return Namespace(name)


def remove_namespace(name: str) -> None:
    """Begin to delete it with its pods, which get five seconds."""
    kubectl("-n", name, "delete", "jobs,pods", "--all", "--grace-period=5", "--cascade=background", "--wait=false")
    kubectl("delete", "namespace", name, "--wait=false")


def until_gone(name: str) -> None:
    """Wait until a namespace that is being removed is gone."""
    until(lambda: not _exists(name), what=f"namespace {name} is gone", timeout_s=120, every_s=1)


def _exists(name: str) -> bool:
    try:
        kubectl("get", "namespace", name)
    except Refused:
        return False
    return True


@pytest.fixture
def shared_claim(settings: ClusterSettings, namespace: Namespace, workloads: Workloads) -> Iterator[str]:
    """A PersistentVolumeClaim that pods on all nodes mount: a folder of its own."""
    if settings.storage_class:
        namespace.apply(_claim("store", storageClassName=settings.storage_class))
        yield "store"
        return
    if not settings.shared_path:
        pytest.skip("neither CKPT_CLUSTER_STORAGE_CLASS nor CKPT_CLUSTER_SHARED_PATH is set")
    folder = f"/folders/{namespace.name}"
    _claim_folder(namespace, "folders", settings.shared_path)
    _run_on_folders(namespace, workloads, "make", f"import os; os.mkdir({folder!r}); os.chmod({folder!r}, 0o1777)")
    _claim_folder(namespace, "store", f"{settings.shared_path}/{namespace.name}")
    yield "store"
    namespace.kubectl("delete", "jobs", "--all", "--cascade=foreground", "--timeout=80s")
    _run_on_folders(namespace, workloads, "remove", f"import shutil; shutil.rmtree({folder!r})")
    for name in ("folders", "store"):
        kubectl("delete", "persistentvolume", f"{namespace.name}-{name}", "--wait=false")


def _claim(name: str, **spec: Any) -> Object:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}} | spec
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def _claim_folder(namespace: Namespace, name: str, path: str) -> None:
    volume = f"{namespace.name}-{name}"
    spec = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "storageClassName": ""}
    spec |= {"persistentVolumeReclaimPolicy": "Retain", "hostPath": {"path": path}}
    apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume}, "spec": spec})
    namespace.apply(_claim(name, storageClassName="", volumeName=volume))


def _run_on_folders(namespace: Namespace, workloads: Workloads, name: str, program: str) -> None:
    template = workloads.pod(["python3", "-c", program], container=name)
    template["spec"]["volumes"].append({"name": "folders", "persistentVolumeClaim": {"claimName": "folders"}})
    template["spec"]["containers"][0]["volumeMounts"].append({"name": "folders", "mountPath": "/folders"})
    name = f"folder-{name}"
    namespace.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]})

    def ended() -> bool:
        return bool(namespace.watch.pods.get(name, {}).get("status", {}).get("phase") == "Succeeded")

    until(ended, what=lambda: f"{name} ends\n{namespace.watch.report()}")
    namespace.delete_pod(name)


@pytest.fixture
def workloads(settings: ClusterSettings) -> Workloads:
    return Workloads(settings)


@pytest.fixture
def story(namespace: Namespace, workloads: Workloads, bucket: Any) -> Story:
    return Story(namespace, workloads, bucket)


def of_kind(documents: list[Object], kind: str) -> Object:
    return next(document for document in documents if document["kind"] == kind)
