"""``progress`` and ``wait`` with the real SDK. Sidecars that answer: tests/cluster/test_notebook.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from checkpoint_sidecar.kubeflow import NotDurable, Progress, TrainingFailed, progress, wait
from sidecar.errors import NothingFound, SidecarError
from tests.checkpoint_sidecar.api_server import Cluster

if TYPE_CHECKING:
    from kubeflow.trainer import TrainerClient

ENDED = {"exitCode": 0, "reason": "Completed", "message": "everything finished is durable; newest durable step: 80"}


def train_job(*conditions: str, active: int = 0, suspend: bool = False) -> dict[str, Any]:
    true = [{"type": condition, "status": "True"} for condition in conditions]
    status = {"conditions": true, "jobsStatus": [{"name": "node", "active": active}]}
    return {"metadata": {"name": "llama"}, "spec": {"suspend": suspend}, "status": status}


def pod(name: str, *, ended: dict[str, Any] | None = None, sidecar: bool = True) -> dict[str, Any]:
    containers = [{"name": "node", "image": "i"}]
    ours = [{"name": "checkpoint-sidecar", "image": "i", "restartPolicy": "Always"}] if sidecar else []
    state = {"terminated": ended} if ended else {"waiting": {"reason": "ImagePullBackOff"}}
    known = {"name": "checkpoint-sidecar", "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": state}
    status = {"phase": "Succeeded" if ended else "Pending", "initContainerStatuses": [known] if sidecar else []}
    metadata = {"name": name, "annotations": {"batch.kubernetes.io/job-completion-index": "0"}}
    spec = {"initContainers": ours, "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (train_job(), "Created"),
        (train_job(active=1), "Running"),
        (train_job("Suspended", suspend=True), "Suspended"),
        (train_job("Complete"), "Complete"),
        (train_job("Failed"), "Failed"),
    ],
)
def test_the_state_is_that_of_the_train_job(client: TrainerClient, cluster: Cluster, found: dict[str, Any], state: str) -> None:
    cluster.train_jobs["llama"] = found
    assert progress("llama", client).state == state


def test_ended_pods_say_what_is_durable(client: TrainerClient, cluster: Cluster) -> None:
    cluster.train_jobs["llama"] = train_job("Complete")
    cluster.pods = [pod("llama-node-0-0", ended=ENDED)]
    told: list[Progress] = []
    found = wait("llama", client, on_progress=told.append)
    assert (found.state, found.durable_step, found.status.level) == ("Complete", 80, "safe")
    assert told == [found]
    assert str(found).splitlines()[0] == "llama: Complete; step 80 is durable"


def test_a_pod_that_has_not_started_is_named_with_its_reason(client: TrainerClient, cluster: Cluster) -> None:
    cluster.train_jobs["llama"] = train_job(active=1)
    cluster.pods = [pod("llama-node-0-0")]
    assert "llama-node-0-0 has not started: ImagePullBackOff" in str(progress("llama", client))


def test_a_job_that_trains_without_a_sidecar_is_an_error(client: TrainerClient, cluster: Cluster) -> None:
    cluster.train_jobs["llama"] = train_job(active=1)
    cluster.pods = [pod("llama-node-0-0", sidecar=False)]
    with pytest.raises(NotDurable, match=r"no pod of TrainJob llama has a sidecar: was it trained with options=\[durable"):
        progress("llama", client)


def test_a_job_that_does_not_exist_is_named(client: TrainerClient) -> None:
    with pytest.raises(NothingFound, match=r"no TrainJob 'other' in namespace research: client\.list_jobs\(\) lists them"):
        progress("other", client)


def test_a_failed_job_raises_with_what_is_durable(client: TrainerClient, cluster: Cluster) -> None:
    cluster.train_jobs["llama"] = train_job("Failed")
    cluster.pods = [pod("llama-node-0-0", ended=ENDED | {"exitCode": 1})]
    with pytest.raises(TrainingFailed, match="TrainJob llama has failed; step 80 is durable") as raised:
        wait("llama", client, on_progress=None)
    assert raised.value.progress.durable_step == 80


def test_a_job_that_does_not_end_in_time_goes_on(client: TrainerClient, cluster: Cluster) -> None:
    cluster.train_jobs["llama"] = train_job()
    with pytest.raises(
        TimeoutError, match=r"TrainJob llama is Created after 0\.05 s; nothing is known to be durable; it goes on"
    ):
        wait("llama", client, timeout_s=0.05, every_s=0.01, on_progress=None)


def test_a_client_without_a_cluster_is_refused() -> None:
    class Other:
        backend = object()

    with pytest.raises(SidecarError, match="progress needs a cluster, not object"):
        progress("llama", Other())
