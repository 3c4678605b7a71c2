"""A notebook with the Kubeflow SDK: ``durable`` in ``TrainerClient.train``, ``progress``, ``wait``, and ``kubectl ckpt``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from checkpoint_sidecar.kubeflow import NotDurable, Progress, durable, progress, wait
from sidecar.errors import ConfigurationError
from tests.cluster.conftest import Namespace
from tests.cluster.file_trainer import weights_after
from tests.cluster.kubectl import SIDECAR, until
from tests.cluster.settings import ClusterSettings
from tests.cluster.story import Story
from tests.cluster.test_kubectl_plugin import Plugin
from tests.cluster.test_webhook import Webhook
from tests.cluster.workloads import SECRET, Workloads

pytestmark = [
    pytest.mark.usefixtures("trainer"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]
STEPS = 120


@pytest.fixture
def webhook(tmp_path: Path, settings: ClusterSettings, namespace: Namespace) -> Any:
    made = Webhook(tmp_path, settings, namespace)
    yield made
    made.remove()


@pytest.fixture
def client(namespace: Namespace) -> Any:
    trainer = pytest.importorskip("kubeflow.trainer")
    return trainer.TrainerClient(trainer.KubernetesBackendConfig(namespace=namespace.name))


def train(client: Any, workloads: Workloads, *options: Any) -> str:
    """Train as a notebook does, in a container: the SDK's functions need an image with its packages."""
    from kubeflow.trainer import CustomTrainerContainer
    from kubeflow.trainer.options import Name, TrainerCommand

    image = workloads.settings.trainer_image or workloads.settings.image
    trainer = CustomTrainerContainer(image=image, num_nodes=1)
    command = TrainerCommand(["python3", "/scripts/file_trainer.py"])
    name: str = client.train(runtime="durable", trainer=trainer, options=[Name("llama"), command, *options])
    return name


def plain_runtime(workloads: Workloads) -> Any:
    pod = workloads.pod(["python3", "-c", "print('replaced')"], container="node", STEPS=STEPS, SAVE_EVERY=20)
    return workloads.training_runtime(pod)


def test_durable_training_from_a_notebook_survives_its_pod(
    story: Story, workloads: Workloads, webhook: Webhook, client: Any, tmp_path: Path
) -> None:
    run = Story(story.namespace, workloads, story.bucket, name="llama", trainer="node", kind="trainjob")
    run.namespace.apply(plain_runtime(workloads))
    store = f"s3://{workloads.settings.bucket}/{{namespace}}/{{name}}"
    job = train(client, workloads, durable(store=store, data_connection=SECRET, keep=3, grace="60"))
    first = run.at_step(30)
    seen = progress(job, client)
    assert (seen.job, seen.state, seen.status.pods_answering) == ("llama", "Running", 1)
    assert seen.durable_step in run.committed() or seen.durable_step == 20

    found = Plugin(tmp_path, run.namespace).json("status", "llama")
    assert (found["kind"], found["pods_answering"]) == ("TrainJob", 1)

    told: list[Progress] = []
    ended: list[Progress] = []
    waiting = threading.Thread(
        target=lambda: ended.append(wait(job, client, timeout_s=180, every_s=0.5, on_progress=told.append))
    )
    waiting.start()
    run.namespace.delete_pod(first.pod)
    assert run.weights() == weights_after(STEPS)
    waiting.join(timeout=120)
    assert ended, [str(each) for each in told]
    assert (ended[0].state, ended[0].durable_step) == ("Complete", STEPS), str(ended[0])
    pod = next(iter(run.namespace.watch.pods.values()))
    sidecar = next(found for found in pod["spec"]["initContainers"] if found["name"] == SIDECAR)
    assert {"name": "CKPT_KEEP_STORE", "value": "3"} in sidecar["env"]


def test_pausing_a_train_job_suspends_it_and_it_goes_on(
    story: Story, workloads: Workloads, client: Any, tmp_path: Path
) -> None:
    run = Story(story.namespace, workloads, story.bucket, name="llama", trainer="node", kind="trainjob")
    run.start(plain_runtime(workloads))
    job = train(client, workloads, durable(store=f"s3://{workloads.settings.bucket}/{{namespace}}/{{name}}", through="runtime"))
    run.at_step(5)
    paused = Plugin(tmp_path, run.namespace).json("pause", job)
    assert (paused["suspended"], paused["workload"], paused["pods_left"]) == (True, "TrainJob llama", [])
    until(lambda: progress(job, client).state == "Suspended", what="the TrainJob is suspended")
    run.namespace.patch("trainjob", job, {"spec": {"suspend": False}})
    assert run.weights() == weights_after(STEPS)
    run.completed()


def test_without_a_webhook_the_notebook_says_so(story: Story, workloads: Workloads, client: Any) -> None:
    story.namespace.apply(plain_runtime(workloads))
    store = f"s3://{workloads.settings.bucket}/{{namespace}}/{{name}}"
    with pytest.raises(ConfigurationError, match="no webhook of namespace"):
        train(client, workloads, durable(store=store))
    assert "llama" not in story.namespace.kubectl("get", "trainjobs")
    job = train(client, workloads)

    def said() -> str:
        try:
            progress(job, client)
        except NotDurable as error:
            return str(error)
        return ""

    assert "no pod of TrainJob llama has a sidecar" in until(said, what=story.namespace.watch.report)
    story.namespace.kubectl("delete", "trainjob", job, "--wait=false")
