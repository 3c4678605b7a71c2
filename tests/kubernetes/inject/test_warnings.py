from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject import NotInjectable, Options, inject, inject_text
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.building import POD, STORE, asked, in_job, in_pod, job, several, sidecar_of, with_volume

WARNED_OF = {
    "grace": (in_pod("terminationGracePeriodSeconds", None), {}, "terminationGracePeriodSeconds: is not set"),
    "sub-path": (with_volume({"emptyDir": {}}, subPath="x"), {}, "containers[0].volumeMounts: subPath"),
    "size limit": (with_volume({"emptyDir": {"sizeLimit": "1Gi"}}), {}, "volumes: v: sizeLimit"),
    "memory": (with_volume({"emptyDir": {"medium": "Memory"}}), {}, "memory limits"),
    "taken name": (job(volumes=[{"name": "checkpoints", "emptyDir": {}}]), {}, "has a volume 'checkpoints'"),
    "mount below": (
        in_pod("containers.0.volumeMounts", [{"name": "v", "mountPath": "/checkpoints/run"}]),
        {},
        "volumeMounts[0]: the sidecar does not see what is saved below /checkpoints/run: mount 'v' at /checkpoints itself",
    ),
    "mount above": (
        in_pod("containers.0.volumeMounts", [{"name": "v", "mountPath": "/data/"}]),
        {"dir": "/data/ckpt"},
        "volumeMounts[0]: the new volume at /data/ckpt hides the files that volume 'v' has there: give --dir /data, or a",
    ),
    "ephemeral": (in_pod("containers.0.resources", {"limits": {"ephemeral-storage": "1Gi"}}), {}, "limits.ephemeral-storage"),
    "user": (in_pod("securityContext", None), {}, "--run-as-user"),
    "root": (in_pod("securityContext.runAsUser", 0), {}, "the trainer is root"),
    "host network": (in_pod("hostNetwork", True), {}, "spec.hostNetwork: 9470"),
    "port": (in_pod("containers.0.ports", [{"containerPort": 9470}]), {}, "containers[0].ports[0]: 9470"),
    "always": (
        {"apiVersion": "v1", "kind": "Pod", "spec": job()["spec"]["template"]["spec"] | {"restartPolicy": "Always"}},
        {},
        "Always",
    ),
    "classic always": (in_pod("restartPolicy", None), {"mode": "classic"}, "classic sidecar ends"),
    "never": (in_pod("restartPolicy", "Never"), {"kubernetes_version": "1.31"}, "waiting for ever"),
    "too old": (job(), {"mode": "native", "kubernetes_version": "1.28"}, "need 1.29"),
    "exit codes": (
        in_job(podFailurePolicy={"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}]}),
        {},
        "rules[0].onExitCodes: without containerName",
    ),
    "backoff": (in_job(backoffLimit=0), {}, "spec.backoffLimit: 0"),
    "no index": (in_job(parallelism=3), {}, "spec.completionMode"),
    "replicas": (
        several("Deployment", {"replicas": 2, "strategy": {"type": "Recreate"}, "template": job()["spec"]["template"]}),
        {},
        "spec.replicas: several",
    ),
    "no hook": (in_pod("containers.0.env", None), {}, "nothing here starts the hook"),
    "python path": (job(), {"install_hook": "true"}, "env: PYTHONPATH"),
    "shell": (in_pod("containers.0.command", ["sh", "-c", "cd /x && python t.py"]), {}, "may keep SIGTERM to itself"),
    "credentials": (
        in_pod("containers.0.envFrom", [{"secretRef": {"name": "s"}}]),
        {"secret": "s"},
        "containers[0].envFrom[0]",
    ),
    "no credentials": (job(), {"secret": None}, "nothing here gives the sidecar credentials"),
    "no bucket": (
        in_pod("serviceAccountName", "trainer"),
        {"secret": None, "store": "s3:///runs/x"},
        "the bucket of s3:///runs/x would come from a Secret",
    ),
    "image": (job(), {"image": None}, "name your registry's"),
    "rollout": (several("Deployment", {"template": job()["spec"]["template"]}), {}, "spec.strategy"),
}


@pytest.mark.parametrize("name", WARNED_OF)
def test_what_will_go_wrong_is_said_with_its_path(name: str) -> None:
    document, given, text = WARNED_OF[name]
    given = {"image": "registry/x:1", "secret": "data-connection"} | given
    chosen = asked(**{key: value for key, value in given.items() if value is not None})
    said = [str(warning) for warning in inject(document, chosen).warnings]
    assert [line for line in said if text in line] == said[:1], said
    assert len(said) == 1


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "CKPT_CREDENTIALS_DIR"])
def test_credentials_that_a_person_gave_the_sidecar_are_seen(name: str) -> None:
    chosen = asked(image="registry/x:1")
    once = inject(job(), chosen).document
    sidecar_of(once["spec"]["template"]["spec"])["env"].append({"name": name, "value": "x"})
    assert inject(once, chosen).warnings == ()
    assert inject(job(), asked(image="registry/x:1", cloud_identity="true")).warnings == ()


def test_a_right_pod_has_no_warnings() -> None:
    assert inject(job(), asked(image="registry/x:1", secret="data-connection")).warnings == ()


def ray_cluster(head: dict[str, Any], *, head_gpu: bool = False, worker_gpu: bool = False) -> dict[str, Any]:
    """Return a RayCluster with one worker group."""

    def template(has_gpu: bool) -> dict[str, Any]:
        spec = copy.deepcopy(job()["spec"]["template"]["spec"])
        if has_gpu:
            spec["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1}}
        return {"template": {"spec": spec}}

    groups = [{"groupName": "gpu", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, **template(worker_gpu)}]
    return {"headGroupSpec": {"rayStartParams": head, **template(head_gpu)}, "workerGroupSpecs": groups}


@pytest.mark.parametrize(
    ("head", "head_gpu", "worker_gpu", "is_warned"),
    [
        ({}, False, False, True),
        ({"num-cpus": "4"}, False, False, True),
        ({}, True, True, True),
        ({"num-cpus": "0"}, False, False, False),
        ({"num-cpus": "0"}, True, True, False),
        ({}, False, True, False),
        ({"num-gpus": "0"}, True, True, False),
    ],
)
@pytest.mark.parametrize("kind", ["RayCluster", "RayJob", "RayCronJob"])
def test_a_ray_head_that_may_train_beside_worker_groups_is_named(
    kind: str, head: dict[str, Any], head_gpu: bool, worker_gpu: bool, is_warned: bool
) -> None:
    """It trained without a sidecar, and nothing said so."""
    cluster = ray_cluster(head, head_gpu=head_gpu, worker_gpu=worker_gpu)
    path = {"RayCluster": "spec", "RayJob": "spec.rayClusterSpec", "RayCronJob": "spec.jobTemplate.rayClusterSpec"}[kind]
    spec: Any = cluster
    for key in reversed(path.split(".")[1:]):
        spec = {key: spec}
    document = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "llama"}, "spec": spec}
    said = [str(each) for each in inject(document, asked(image="registry/x:1", secret="s")).warnings if "head" in each.text]
    text = 'the head gets no sidecar beside worker groups, and Ray may place training there: give it num-cpus: "0"'
    assert said == ([f"{path}.headGroupSpec.rayStartParams: {text}"] if is_warned else [])


TENSORFLOW = {"template": {"spec": {"containers": [{"name": "tensorflow", "image": "i"}]}}}
MPIRUN = {"spec": {"containers": [{"name": "a", "image": "i", "command": ["sh", "-c", "mpirun -np 4 python t.py"]}]}}
WORKER = {"name": "w", "template": POD}
CONTAINER = {"name": "node", "image": "i"}


@pytest.mark.parametrize(
    ("api", "kind", "spec", "said"),
    [
        ("kubeflow.org/v1", "TFJob", {"tfReplicaSpecs": {"PS": TENSORFLOW, "Worker": TENSORFLOW}}, ["ps, worker"]),
        ("kubeflow.org/v1", "TFJob", {"tfReplicaSpecs": {"Chief": TENSORFLOW, "Worker": TENSORFLOW}}, []),
        ("batch.volcano.sh/v1alpha1", "Job", {"tasks": [{"name": "m", "template": MPIRUN}, WORKER]}, ["m, w"]),
        ("batch.volcano.sh/v1alpha1", "Job", {"tasks": [{"name": "m", "template": POD}, WORKER]}, []),
    ],
)
def test_parts_that_serve_or_launch_count_as_nodes_and_are_named(api: str, kind: str, spec: Any, said: list[str]) -> None:
    """Their sidecars wait for files that nobody writes, so that no checkpoint of the run was ever committed."""
    document = {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, "spec": copy.deepcopy(spec)}
    found = [str(each) for each in inject(document, asked(image="registry/x:1", secret="s")).warnings]
    parts = [line.partition(": all of their pods")[0] for line in found if "as one run" in line]
    assert parts == [f"spec.{next(iter(spec))}: {names}" for names in said]


def test_ranks_of_mpirun_get_the_hook_only_by_its_options_in_a_runtime_too() -> None:
    jobs = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": {"containers": [CONTAINER]}}}}}]}
    spec = {"mlPolicy": {"numNodes": 2, "mpi": {"runLauncherAsNode": True}}, "template": {"spec": jobs}}
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    given = asked(image="registry/x:1", secret="s", install_hook="true")
    assert [each for each in inject(document, given).warnings if "-x PYTHONPATH" in each.text]


REFUSALS = {
    "no kind": ({"apiVersion": "v1"}, {}, "kind is missing"),
    "unknown kind": (
        {"apiVersion": "x/v1", "kind": "Thing", "spec": {"a": [{"containers": [{"name": "c", "image": "i"}]}]}},
        {},
        "spec.a[0]: a pod of kind Thing",
    ),
    "no template": ({"apiVersion": "batch/v1", "kind": "Job", "spec": {}}, {}, "spec: must be a mapping with an entry"),
    "which trains": (
        in_pod("containers", [{"name": "a"}, {"name": "b"}]),
        {},
        "spec.template.spec.containers: which one trains, a, b?",
    ),
    "nobody trains": (job(), {"trainer_container": "other"}, "spec.template: no pod has a container 'other'"),
    "no containers": (in_pod("containers", []), {}, "spec.template.spec.containers: no container"),
    "wrong type": (in_pod("containers", {"name": "a"}), {}, "spec.template.spec.containers: must be a list"),
    "read-only": (with_volume({"emptyDir": {}}, readOnly=True), {}, "containers[0].volumeMounts[0].readOnly"),
    "relative directory": (
        in_pod("containers.0.env", [{"name": "CKPT_DIR", "value": "out"}]),
        {},
        "spec.template.spec.containers[0].env: CKPT_DIR='out' is no path for a volume",
    ),
    "directory of a variable": (
        in_pod("containers.0.env", [{"name": "CKPT_DIR", "value": "/data/$(RUN)"}]),
        {},
        "spec.template.spec.containers[0].env: CKPT_DIR='/data/$(RUN)' is no path for a volume",
    ),
    "read-only claim": (
        with_volume({"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}),
        {},
        "spec.template.spec.volumes: 'v' is readOnly: nothing can be saved in /checkpoints",
    ),
    "config map": (with_volume({"configMap": {"name": "x"}}), {}, "spec.template.spec.volumes: 'v' cannot hold"),
    "no volume": (
        in_pod("containers.0.volumeMounts", [{"name": "v", "mountPath": "/checkpoints"}]),
        {},
        "there is no volume 'v'",
    ),
    "no grace": (in_pod("terminationGracePeriodSeconds", 0), {}, "terminationGracePeriodSeconds: 0 leaves no time"),
    "other sidecar": (
        in_pod("initContainers", [{"name": "checkpoint-sidecar", "command": ["sleep"]}]),
        {},
        "is something else",
    ),
    "its volume": (
        in_pod("containers.0.volumeMounts", [{"name": "checkpoint-credentials", "mountPath": "/x"}]),
        {"secret": "s"},
        "spec.template.spec.containers[0].volumeMounts: checkpoint-credentials is the sidecar's",
    ),
    "windows": (in_pod("os", {"name": "windows"}), {}, "os.name: the sidecar needs Linux"),
    "no store": (job(), {"store": None}, "--store is missing"),
    "no bucket": (
        {**job(), "metadata": {"name": "x", "namespace": "ab"}},
        {"store": "s3://{namespace}/x"},
        "--store s3://ab/x names no bucket",
    ),
    "no bucket of a run": (
        {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a", "namespace": "ab"}},
        {"store": "s3://{namespace}/x"},
        "--store s3://ab/x names no bucket",
    ),
    "store that is mounted nowhere": (job(), {"store": "file:///store/x"}, "no volume is mounted there in the sidecar"),
    "store on the volume": (job(), {"store": "file:///checkpoints/x"}, "must lie outside CKPT_DIR=/checkpoints"),
    "store on its volume": (job(), {"store": "file:///scratch/x", "dir": "/scratch"}, "must lie outside CKPT_DIR=/scratch"),
    "no name": ({**job(), "metadata": {}}, {"store": "s3://bucket/{name}"}, "metadata.name: is missing"),
    "other cluster": (
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": {"clusterSelector": {"ray.io/cluster": "c"}}},
        {},
        "spec.clusterSelector",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_understood_is_refused_with_its_place(name: str) -> None:
    document, given, text = REFUSALS[name]
    given = {"store": "s3://bucket/run"} | given
    chosen = {key.replace("_", "-"): value for key, value in given.items() if value is not None}
    with pytest.raises(NotInjectable, match=re.escape(text)):
        inject(document, with_given(Options(), chosen))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"store": "gs://b"}, "--store='gs://b' must be s3://"),
        ({"store": "s3://ab/x"}, "--store='s3://ab/x' names no bucket: 'ab' is no bucket name: 3 to 63"),
        ({"store": "file:///a/../x"}, "must be file:///path without '..'"),
        ({"store": "s3://bucket/{job}"}, "has braces that are neither {namespace} nor {name}"),
        ({"store": "s3://bucket/../{name}"}, "must have a plain path as its prefix"),
        ({"store": "s3://bucket/x?versionId=1"}, "must have no '?'"),
        ({"store": "s3://bucket/a\tb/{name}"}, "must have no tab, no line break"),
        ({"store": "s3://me:hunter2@bucket/x"}, "--store='s3://…@bucket/x' must not hold credentials"),
        ({"store": "file://host/x"}, "must be file:///path"),
        ({"kubernetes-version": "new"}, "must be a version such as 1.31"),
        ({"grace": "0"}, "--grace='0' must be a duration from 1s to 24h"),
        ({"grace": "2 m"}, "--grace='2 m' must be a duration from 1s to 24h"),
        ({"grace": "25h"}, "--grace='25h' must be a duration from 1s to 24h"),
        ({"wrong": "x"}, "--wrong is not an option"),
        ({"CKPT_KEEP_STOER": "1"}, "did you mean CKPT_KEEP_STORE?"),
        ({"CKPT_GRACE_SECONDS": "9"}, "use --grace"),
        ({"claim": "c", "store": "s3://bucket/x"}, "--claim is for a file:// store"),
        ({"metrics-port": "9470"}, "--metrics-port 9470 is the API's port, too"),
        ({"metrics-port": "9500", "api-port": "9500"}, "--metrics-port 9500 is the API's port, too"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        with_given(Options(), given)


@pytest.mark.parametrize(("text", "seconds"), [("120", 120), ("90s", 90), ("2m", 120), ("1h", 3600)])
def test_the_grace_period_is_a_duration(text: str, seconds: int) -> None:
    assert with_given(Options(), {"grace": text}).grace == seconds


def test_text_that_is_no_yaml_is_refused_with_its_line() -> None:
    with pytest.raises(NotInjectable, match=r"line 3 of the document: .*template must be rendered"):
        inject_text("kind: Job\nspec: {{ .Values.spec }}\n  x: [\n", STORE)
    with pytest.raises(NotInjectable, match=r"nothing here has pods of a known kind .* by the label checkpoint-sidecar/inject"):
        inject_text("kind: Service\napiVersion: v1\n", STORE)
    with pytest.raises(NotInjectable, match=r"has a placeholder \({{ … }}\); a template must be rendered first"):
        inject_text("kind: Job\napiVersion: batch/v1\nmetadata:\n  name: {{ .Release.Name }}\n", STORE)


@pytest.mark.parametrize(("given", "is_said"), [({}, True), ({"pods": "gpu"}, False)])
def test_a_ray_group_without_an_accelerator_may_only_prepare_data(given: dict[str, str], is_said: bool) -> None:
    def group(name: str, limits: dict[str, int]) -> dict[str, Any]:
        containers = [{"name": "w", "image": "i", "resources": {"limits": limits}}]
        return {"groupName": name, "replicas": 2, "template": {"spec": {"containers": containers}}}

    groups = [group("gpu", {"nvidia.com/gpu": 8}), group("cpu", {"cpu": 8})]
    said = inject(several("RayCluster", {"workerGroupSpecs": groups}), asked(**given)).warnings
    found = [str(warning) for warning in said if "counts as nodes" in warning.text]
    path = "spec.workerGroupSpecs[1].template"
    text = f"{path}: cpu has no accelerator, and counts as nodes of the run like gpu: where it does not train, --pods gpu"
    assert found == ([text] if is_said else [])


@pytest.mark.parametrize("source", [{}, {"azureFile": {"secretName": "s", "shareName": "s"}}, {"rbd": {}}, {"nfs": {}}])
def test_a_volume_of_any_kind_that_can_be_written_holds_checkpoints(source: dict[str, Any]) -> None:
    """Kubernetes makes an emptyDir of a volume without a source."""
    spec = inject(with_volume(source), STORE).document["spec"]["template"]["spec"]
    assert [mount["name"] for mount in sidecar_of(spec)["volumeMounts"]] == ["checkpoint-sidecar-state", "v"]


YAML_1_1 = """
apiVersion: batch/v1
kind: Job
metadata: {name: run}
spec:
  template:
    spec:
      hostNetwork: %s
      containers:
        - name: main
          image: i
          volumeMounts: [{name: c, mountPath: /checkpoints, readOnly: %s}]
      volumes: [{name: c, emptyDir: {}}]
"""


def test_booleans_are_read_as_kubernetes_reads_yaml() -> None:
    """``no`` is false to kubectl, and a text to YAML 1.2."""

    def said(text: str) -> bool:
        return any("hostNetwork" in warning.path for warning in inject_text(text, STORE).warnings)

    assert not said(YAML_1_1 % ("no", "off"))
    assert said(YAML_1_1 % ("yes", "no"))
    with pytest.raises(NotInjectable, match="nothing can be saved in /checkpoints"):
        inject_text(YAML_1_1 % ("no", "yes"), STORE)
