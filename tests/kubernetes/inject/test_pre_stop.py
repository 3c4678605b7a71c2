"""With ``ray start`` and ``sshd`` the training ends at SIGTERM: a preStop hook keeps it back until the training has saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.kubernetes.inject import Options, inject
from tests.deploy.building import POD, STORE, asked, job
from tests.deploy.schemas import pod_templates

GROUPS = {"workerGroupSpecs": [{"groupName": "gpu", "replicas": 2, "template": POD}]}
HOLDS = """
import sys
from pathlib import Path
from trainer_hook.volume.lease import hold
print(hold(Path(sys.argv[1]), 3), flush=True)
input()
"""


def of_ray(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "llama"}, "spec": spec}


def ray_pod(**container: Any) -> dict[str, Any]:
    """Return a pod as KubeRay makes it."""
    metadata = {"name": "llama-gpu-worker-x", "labels": {"ray.io/cluster": "llama"}}
    containers = [{"name": "ray-worker", "image": "i", **container}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


MPI_JOB = {
    "apiVersion": "kubeflow.org/v2beta1",
    "kind": "MPIJob",
    "metadata": {"name": "llama"},
    "spec": {"mpiReplicaSpecs": {"Worker": {"replicas": 2, "template": POD}}},
}
NODE = {"spec": {"containers": [{"name": "node", "image": "i", "command": ["/usr/sbin/sshd", "-De"]}]}}
MPI_RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainingRuntime",
    "metadata": {"name": "deepspeed"},
    "spec": {
        "mlPolicy": {"mpi": {"numProcPerNode": 1}},
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": NODE}}}]}},
    },
}


def lifecycle(document: dict[str, Any], options: Options = STORE) -> dict[str, Any]:
    """Return the lifecycle of the trainer after an injection, which a second one does not change."""
    done = inject(document, options).document
    assert inject(done, options).document == done
    [pod] = [done] if done["kind"] == "Pod" else pod_templates(done)
    hooks: dict[str, Any] = pod["spec"]["containers"][0].get("lifecycle", {})
    return hooks


@pytest.mark.parametrize(
    "document",
    [
        of_ray("RayCluster", GROUPS),
        of_ray("RayJob", {"rayClusterSpec": GROUPS}),
        of_ray("RayCronJob", {"jobTemplate": {"rayClusterSpec": GROUPS}}),
        MPI_JOB,
        MPI_RUNTIME,
        ray_pod(lifecycle={"postStart": {"exec": {"command": ["true"]}}}),
    ],
    ids=lambda document: document["kind"],
)
def test_the_container_gets_sigterm_when_the_training_has_ended(document: dict[str, Any]) -> None:
    assert lifecycle(document)["preStop"]["exec"]["command"][0] == "python3"


def test_others_get_sigterm_at_once() -> None:
    assert lifecycle(job()) == {}
    assert lifecycle(of_ray("RayCluster", GROUPS), asked(jit="false")) == {}


def test_a_pre_stop_hook_that_is_there_stays_with_a_warning() -> None:
    own = {"preStop": {"exec": {"command": ["ray", "stop"]}}}
    assert lifecycle(ray_pod(lifecycle=own)) == own
    said = [
        warning.path
        for warning in inject(ray_pod(lifecycle=own), STORE).warnings
        if "without it one is written" in warning.text
    ]
    assert said == ["spec.containers[0].lifecycle.preStop"]


def test_the_pre_stop_hook_waits_for_the_processes_that_train(tmp_path: Path) -> None:
    command = lifecycle(ray_pod())["preStop"]["exec"]["command"]
    environ = {"PATH": os.environ["PATH"], "CKPT_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"True\n"
        (tmp_path / ".ckpt/ranks/0.lease").touch()  # of a process that has ended
        with subprocess.Popen([sys.executable, *command[1:]], env=environ) as hook:
            with pytest.raises(subprocess.TimeoutExpired):
                hook.wait(1)
            trainer.communicate(b"\n")
            assert hook.wait(20) == 0
