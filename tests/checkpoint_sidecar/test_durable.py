"""``durable`` with the real SDK: what it sends to the API server, and what it says before that."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from checkpoint_sidecar.kubeflow import Durable, durable
from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject import Options, inject
from sidecar.kubernetes.inject.options import with_given
from tests.checkpoint_sidecar.api_server import Cluster
from tests.deploy.schemas import VERSIONS, complaints
from tests.lazy import LazyModule

if TYPE_CHECKING:
    from kubeflow.trainer import TrainerClient

sdk, sdk_options, sdk_types = (LazyModule(f"kubeflow.trainer{name}") for name in ("", ".options", ".types.types"))

STORE = "s3://bucket/runs/{name}"


def train() -> None:
    print("trains")


def trained(client: TrainerClient, cluster: Cluster, *options: Any, trainer: Any = None) -> dict[str, Any]:
    """Return the TrainJob that the SDK sends."""
    name = client.train(trainer=trainer or sdk.CustomTrainer(func=train, num_nodes=2), options=list(options))
    sent = cluster.train_jobs[name]
    assert not complaints(sent, VERSIONS[-1])
    return sent


def patched_pod(train_job: dict[str, Any]) -> dict[str, Any]:
    """Return the patch of the pods of ``node``."""
    [patch] = [found for found in train_job["spec"]["runtimePatches"] if found["manager"] == "checkpoint-sidecar/inject"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    pod: dict[str, Any] = job["template"]["spec"]["template"]
    return pod


def pod_of(runtime: dict[str, Any], patch: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a pod as JobSet makes it of the runtime and the patch."""
    template = copy.deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
    metadata = copy.deepcopy(patch["metadata"])
    metadata["labels"] = metadata.get("labels", {}) | {"jobset.sigs.k8s.io/jobset-name": name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{name}-node-0-0"} | metadata, "spec": template["spec"]}


def test_the_pods_ask_the_webhook_and_get_what_inject_adds(client: TrainerClient, cluster: Cluster) -> None:
    option = durable(store=STORE, data_connection="aws-connection-1", save_steps=500, jit=False, keep=3, grace="2m")
    sent = trained(client, cluster, sdk_options.Name("llama"), option)
    pod = pod_of(cluster.runtime, patched_pod(sent), "llama")
    code, admitted = cluster.admit(pod)
    assert code == 201
    given = {"store": "s3://bucket/runs/llama", "secret": "aws-connection-1", "save-steps": "500", "jit": "false"}
    given |= {"keep-store": "3", "grace": "120", "install-hook": "true", "image": "registry.example/checkpoint-sidecar:1"}
    assert admitted == inject(pod, with_given(Options(), given)).document
    [sidecar] = [found for found in admitted["spec"]["initContainers"] if found["name"] == "checkpoint-sidecar"]
    assert sidecar["restartPolicy"] == "Always"
    env = {entry["name"]: entry.get("value") for entry in sidecar["env"]}
    assert (env["CKPT_STORE"], env["CKPT_KEEP_STORE"]) == ("s3://bucket/runs/llama", "3")
    trainer = {entry["name"]: entry.get("value") for entry in admitted["spec"]["containers"][0]["env"]}
    assert (trainer["CKPT_SAVE_STEPS"], trainer["CKPT_JIT"], trainer["CKPT_HOOK"]) == ("500", "0", "auto")
    assert admitted["spec"]["terminationGracePeriodSeconds"] == 120


def test_a_claim_becomes_a_volume_of_the_sidecar_alone(client: TrainerClient, cluster: Cluster) -> None:
    assert cluster.webhook is not None
    cluster.webhook = replace(cluster.webhook, store="s3:///runs/{name}", secret="the-default")
    sent = trained(client, cluster, durable(store="pvc://training-data/runs/{name}"))
    _, admitted = cluster.admit(pod_of(cluster.runtime, patched_pod(sent), "llama"))
    assert {"name": "checkpoint-store", "persistentVolumeClaim": {"claimName": "training-data"}} in admitted["spec"]["volumes"]
    [sidecar] = [found for found in admitted["spec"]["initContainers"] if found["name"] == "checkpoint-sidecar"]
    assert {"name": "CKPT_STORE", "value": "file:///store/runs/llama"} in sidecar["env"]
    assert "the-default" not in str(admitted), "the webhook's credentials are for another kind of store"


def test_it_stands_beside_other_options_in_any_order(client: TrainerClient, cluster: Cluster) -> None:
    other = sdk_options.RuntimePatch(sdk_options.TrainingRuntimeSpecPatch(template=None))
    for options in (
        [durable(store=STORE), sdk_options.Labels({"team": "a"}), other],
        [other, sdk_options.Labels({"team": "a"}), durable(store=STORE)],
    ):
        sent = trained(client, cluster, *options)
        assert sent["metadata"]["labels"] == {"team": "a"}
        assert sorted(patch["manager"] for patch in sent["spec"]["runtimePatches"]) == [
            "checkpoint-sidecar/inject",
            "trainer.kubeflow.org/kubeflow-sdk",
        ]
        assert patched_pod(sent)["metadata"]["labels"] == {"checkpoint-sidecar/inject": "true"}


def test_a_runtime_with_the_sidecar_gets_the_variables_of_the_run(client: TrainerClient, cluster: Cluster) -> None:
    trainer = sdk.CustomTrainer(func=train, num_nodes=2, env={"HF_HOME": "/tmp"})
    sent = trained(client, cluster, durable(store=STORE, save_steps=5, grace=90, through="runtime"), trainer=trainer)
    spec = patched_pod(sent)["spec"]
    [sidecar] = spec["initContainers"]
    env = {entry["name"]: entry.get("value") for entry in sidecar["env"]}
    assert sidecar["name"] == "checkpoint-sidecar"
    assert env["CKPT_STORE"] == "s3://bucket/runs/$(JOBSET_NAME)"
    assert (env["CKPT_NODE_COUNT"], env["CKPT_GRACE_SECONDS"], spec["terminationGracePeriodSeconds"]) == ("2", "90", 90)
    own = {entry["name"]: entry.get("value") for entry in sent["spec"]["trainer"]["env"]}
    assert own["HF_HOME"] == "/tmp"
    assert own["CKPT_SAVE_STEPS"] == "5"
    assert not cluster.created_pods, "no webhook is needed"
    named = trained(
        client,
        cluster,
        sdk_options.Name("llama"),
        durable(store=STORE, through="runtime"),
        trainer=sdk.CustomTrainerContainer("i"),
    )
    assert {"name": "CKPT_STORE", "value": "s3://bucket/runs/llama"} in patched_pod(named)["spec"]["initContainers"][0]["env"]


def test_settings_of_a_trainer_without_environment_are_refused(client: TrainerClient, cluster: Cluster) -> None:
    option = durable(store=STORE, save_steps=5, through="runtime", check=False)
    with pytest.raises(ConfigurationError, match=r"CKPT_SAVE_STEPS cannot be set: BuiltinTrainer takes no environment"):
        option({}, sdk_types.BuiltinTrainer(sdk_types.TorchTuneConfig()), client.backend)


def test_without_a_webhook_it_is_refused_before_the_job_exists(client: TrainerClient, cluster: Cluster) -> None:
    cluster.webhook = None
    with pytest.raises(ConfigurationError, match=r"no webhook of namespace research adds the sidecar: ask the administrator"):
        trained(client, cluster, durable(store=STORE))
    assert not cluster.train_jobs


def test_what_the_webhook_refuses_is_said_before_the_job_exists(client: TrainerClient, cluster: Cluster) -> None:
    cluster.webhook = Options(trainer_container="other")
    with pytest.raises(ConfigurationError, match=r"the webhook refuses it: .*no pod has a container 'other'"):
        trained(client, cluster, durable(store=STORE))


def test_a_webhook_that_does_not_answer_is_an_error(client: TrainerClient, cluster: Cluster) -> None:
    cluster.refusal = (500, 'Internal error occurred: failed calling webhook "pods.checkpoint-sidecar": no endpoints')
    with pytest.raises(ConfigurationError, match="the webhook does not answer, and pods would not start"):
        trained(client, cluster, durable(store=STORE))


def test_without_the_right_to_create_pods_the_check_is_left_out_with_a_warning(
    client: TrainerClient, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.refusal = (403, 'pods is forbidden: User "notebook" cannot create resource "pods"')
    with caplog.at_level(logging.WARNING, "checkpoint_sidecar"):
        trained(client, cluster, durable(store=STORE))
    assert "not checked whether a webhook adds the sidecar" in caplog.text


def test_an_older_trainer_would_drop_it_and_is_refused(client: TrainerClient, cluster: Cluster) -> None:
    cluster.schema = {"TrainJobSpec": {"properties": {"podTemplateOverrides": {}}}}
    with pytest.raises(ConfigurationError, match=r"Kubeflow Trainer is older than 2\.2 and would ignore durable"):
        trained(client, cluster, durable(store=STORE))


def test_without_a_cluster_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="durable needs a cluster, not object"):
        durable(store=STORE)({}, None, object())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"store": "gs://bucket/x"}, r"store='gs://bucket/x' must be s3://bucket/prefix or pvc://claim/folder"),
        ({"store": "pvc://claim"}, r"needs a folder for the run, such as pvc://claim/\{name\}"),
        ({"store": "s3://bucket/{job}"}, r"has braces that are neither"),
        ({"store": STORE, "keep": 0}, r"keep='0' must be a whole number from 1"),
        ({"store": STORE, "data_connection": "A B"}, r"data_connection='A B' must be the name"),
        ({"store": STORE, "save_steps": 5, "save_minutes": 5}, r"choose one"),
        ({"store": STORE, "settings": {"HF_TOKEN": "x"}}, r"'HF_TOKEN' is none of hook or sidecar"),
        ({"store": STORE, "settings": {"CKPT_ASINC": 1}}, r"did you mean CKPT_ASYNC\?"),
        ({"store": STORE, "through": "magic"}, r"through='magic' must be 'webhook' or 'runtime'"),
        ({"store": "pvc://claim/x", "through": "runtime"}, r"a TrainJob cannot add volumes"),
        ({"store": STORE, "data_connection": "c", "through": "runtime"}, r"data_connection cannot be given"),
    ],
)
def test_a_wrong_argument_is_named_in_the_cell_that_has_it(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        durable(**arguments)


def test_further_settings_reach_both_containers(client: TrainerClient, cluster: Cluster) -> None:
    sent = trained(client, cluster, durable(store=STORE, settings={"CKPT_ASYNC": 1, "CKPT_BANDWIDTH_LIMIT": "200MB/s"}))
    _, admitted = cluster.admit(pod_of(cluster.runtime, patched_pod(sent), "llama"))
    env = {entry["name"]: entry.get("value") for entry in admitted["spec"]["containers"][0]["env"]}
    assert env["CKPT_ASYNC"] == "1"
    assert isinstance(durable(store=STORE), Durable)


def test_the_sdk_cannot_express_a_sidecar_itself() -> None:
    """If this fails, the SDK has grown, and ``durable`` may do without a webhook."""
    with pytest.raises(TypeError):
        sdk_options.PodSpecPatch(init_containers=[sdk_options.ContainerPatch(name="checkpoint-sidecar", image="i")])
