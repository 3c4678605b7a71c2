from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.main import main
from sidecar.daemon.settings import from_environment as sidecar_settings
from sidecar.kubernetes.inject import Options, inject, inject_text
from sidecar.kubernetes.inject.options import with_given
from sidecar.volume.hook_install import install
from tests.deploy.building import INDEXED, POD, STORE, asked, in_any_order, job, named, pod_of, several, sidecar_of, values
from tests.deploy.schemas import KUBERNETES, VERSIONS, complaints, documents, pod_templates
from trainer_hook.contract import Node
from trainer_hook.process.settings import from_environment as hook_settings

OF_THE_POD = ("CKPT_CREDENTIALS_DIR", "CKPT_STATE_DIR")
"""Directories that are there, not here."""


def test_the_environment_that_is_written_is_one_that_both_sides_take() -> None:
    given = {
        "install_hook": "true",
        "secret": "s",
        "metrics_port": "9471",
        "api_port": "9999",
        "save_steps": "20",
        "jit": "false",
    }
    chosen = with_given(asked(**given, grace="77", save_total_limit="2"), {"CKPT_KEEP_STORE": "3", "CKPT_SUPERSEDED": "skip"})
    pod = pod_of(inject(job(), chosen))
    of_sidecar = {k: v for k, v in values(sidecar_of(pod)).items() if k not in OF_THE_POD}
    settings = sidecar_settings(of_sidecar)
    assert (settings.grace_seconds, settings.keep_store, settings.api_port, settings.superseded) == (77, 3, 9999, "skip")
    hook = hook_settings(values(named(pod["containers"], "main")))
    assert (hook.grace_seconds, hook.save_steps, hook.save_strategy, hook.jit, hook.save_total_limit) == (
        77,
        20,
        "steps",
        False,
        2,
    )
    assert hook.sidecar_url == "http://127.0.0.1:9999"
    assert pod["terminationGracePeriodSeconds"] == 77


def test_the_commands_of_the_sidecar_are_commands_of_this_program(capsys: pytest.CaptureFixture[str]) -> None:
    sidecar = sidecar_of(pod_of(inject(job(), STORE)))
    probes = [sidecar[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe")]
    for command in [sidecar["command"], sidecar["lifecycle"]["preStop"]["exec"]["command"], *probes]:
        assert command[0] == "checkpoint-sidecar"
        assert main([*command[1:], "--help"]) == 0  # parsed whole, and nothing is run
        assert f"Usage: checkpoint-sidecar {command[1]}" in capsys.readouterr().out


def test_the_hook_that_the_init_container_of_a_classic_sidecar_installs_is_active_in_the_trainer(tmp_path: Path) -> None:
    pod = pod_of(inject(job(), asked(install_hook="true", dir=str(tmp_path), mode="classic")))
    [_, *install] = named(pod["initContainers"], "checkpoint-hook")["command"]
    assert "CKPT_INSTALL_HOOK" not in values(sidecar_of(pod))
    subprocess.run([sys.executable, "-m", "sidecar", *install], check=True, capture_output=True, timeout=60)
    assert_hook_is_active(pod, tmp_path)


def test_a_native_sidecar_installs_the_hook_itself(tmp_path: Path) -> None:
    pod = pod_of(inject(job(), asked(install_hook="true", dir=str(tmp_path))))
    assert [container["name"] for container in pod["initContainers"]] == ["checkpoint-sidecar"]
    install(Path(values(sidecar_of(pod))["CKPT_INSTALL_HOOK"]))
    assert_hook_is_active(pod, tmp_path)


def assert_hook_is_active(pod: dict[str, Any], tmp_path: Path) -> None:
    look = "import sys; print('trainer_hook.activation.boot' in sys.modules, sys.modules['sitecustomize'].__file__)"
    env = {"PATH": os.environ["PATH"], **values(pod["containers"][0])}
    shown = subprocess.run([sys.executable, "-c", look], env=env, check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.split() == ["True", f"{tmp_path}/.ckpt/hook/sitecustomize.py"]
    assert shown.stderr == ""


def test_only_the_sidecar_sees_the_credentials() -> None:
    pod = pod_of(inject(job(), asked(secret="data-connection", install_hook="true")))
    assert named(pod["volumes"], "checkpoint-credentials")["secret"] == {"secretName": "data-connection"}
    mounted = [
        c["name"] for c in [*pod["initContainers"], *pod["containers"]] for m in c["volumeMounts"] if "cred" in m["name"]
    ]
    assert mounted == ["checkpoint-sidecar"]
    assert not any("AWS" in name for container in pod["containers"] for name in values(container))


def test_with_a_cloud_identity_every_other_container_is_skipped() -> None:
    document = job(initContainers=[{"name": "data", "image": "i"}])
    [template] = pod_templates(inject(document, asked(cloud_identity="true", install_hook="true")).document)
    assert template["metadata"]["annotations"]["eks.amazonaws.com/skip-containers"] == "data,main"


def test_a_claim_is_mounted_where_the_store_is_and_in_the_sidecar_alone() -> None:
    pod = pod_of(inject(job(), asked(store="file:///store/runs/{name}", claim="checkpoint-store")))
    assert named(sidecar_of(pod)["volumeMounts"], "checkpoint-store")["mountPath"] == "/store"
    assert values(sidecar_of(pod))["CKPT_STORE"] == "file:///store/runs/run"
    assert len(pod["containers"][0]["volumeMounts"]) == 1


def test_the_hook_goes_in_front_of_the_python_path_that_is_there() -> None:
    document = job()
    document["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "PYTHONPATH", "value": "/opt/lib"}]
    pod = pod_of(inject(document, asked(install_hook="true")))
    assert values(pod["containers"][0])["PYTHONPATH"] == "/checkpoints/.ckpt/hook:/opt/lib"
    assert values(sidecar_of(pod))["CKPT_INSTALL_HOOK"] == "/checkpoints/.ckpt/hook"


def test_the_sidecar_is_the_first_init_container_and_runs_as_the_trainer() -> None:
    document = job(initContainers=[{"name": "data", "image": "i"}])
    document["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {"runAsUser": 1234, "runAsGroup": 99}
    pod = pod_of(inject(document, STORE))
    assert [c["name"] for c in pod["initContainers"]] == ["checkpoint-sidecar", "data"]
    secured = sidecar_of(pod)["securityContext"]
    assert (secured["runAsUser"], secured["runAsGroup"], secured["runAsNonRoot"]) == (1234, 99, True)
    assert secured["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(("given", "path"), [("", ""), ("/app:", ":/app:"), (":/app", "::/app"), ("/a:/b:/a", ":/a:/b")])
def test_an_empty_part_of_the_python_path_is_the_working_directory(given: str, path: str) -> None:
    document = job()
    document["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "PYTHONPATH", "value": given}]
    wanted = asked(install_hook="true")
    once = inject(document, wanted).document
    assert values(pod_of(inject(once, wanted))["containers"][0])["PYTHONPATH"] == f"/checkpoints/.ckpt/hook{path}"


def test_a_pod_of_class_guaranteed_stays_one() -> None:
    document = job()
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "8", "memory": "64Gi"}}
    resources = sidecar_of(pod_of(inject(document, STORE)))["resources"]
    assert resources["limits"] == resources["requests"]
    assert set(resources["limits"]) == {"cpu", "memory"}


def test_what_people_added_to_the_sidecar_stays_and_what_was_chosen_before_too() -> None:
    once = inject(job(), asked(store="s3://bucket/first", image="registry/sidecar:1"))
    sidecar = sidecar_of(pod_of(once))
    sidecar["resources"] = {"requests": {"memory": "1Gi"}}
    sidecar["env"].append({"name": "AWS_CA_BUNDLE", "value": "/ca.pem"})
    again = sidecar_of(pod_of(inject(once.document, with_given(Options(), {"grace": "300"}))))
    assert again["resources"] == {"requests": {"memory": "1Gi"}}
    assert again["image"] == "registry/sidecar:1"
    assert values(again) == {**values(sidecar), "CKPT_GRACE_SECONDS": "300"}


def test_a_grace_period_that_is_changed_by_hand_reaches_all_places_at_the_next_injection() -> None:
    once = inject(job(), asked(install_hook="true")).document
    once["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 400
    pod = pod_of(inject(once, asked(install_hook="true")))
    trainer = values(pod["containers"][0])
    assert trainer["CKPT_GRACE_SECONDS"] == trainer["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "400"
    assert values(sidecar_of(pod))["CKPT_GRACE_SECONDS"] == "400"
    pod["containers"][0]["env"].append({"name": "X", "value": "y"})
    named(pod["containers"][0]["env"], "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")["value"] = "20"
    own = values(pod_of(inject(job(**pod), asked(install_hook="true", grace="90")))["containers"][0])
    assert (own["CKPT_GRACE_SECONDS"], own["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], own["X"]) == ("90", "20", "y")


def test_a_hook_that_a_person_switched_off_stays_off() -> None:
    injected = inject(job(), with_given(asked(install_hook="true"), {"CKPT_HOOK": "off"}))
    again = inject(injected.document, asked(install_hook="true"))
    assert [values(pod_of(one)["containers"][0])["CKPT_HOOK"] for one in (injected, again)] == ["off", "off"]


def test_native_and_classic_are_changed_into_each_other() -> None:
    native = inject(job(), asked(mode="native", install_hook="true")).document
    classic = inject(native, asked(mode="classic", install_hook="true"))
    pod = pod_of(classic)
    assert [c["name"] for c in pod["initContainers"]] == ["checkpoint-hook"]
    assert "restartPolicy" not in sidecar_of(pod)
    assert "CKPT_INSTALL_HOOK" not in values(sidecar_of(pod))
    back = inject(classic.document, asked(mode="native", install_hook="true"))
    assert in_any_order(pod_of(back)) == in_any_order(pod_of(inject(native, asked(mode="native", install_hook="true"))))


@pytest.mark.parametrize(
    ("version", "where"), [("1.28", "containers"), ("1.29", "initContainers"), ("v1.31.4-gke.1", "initContainers")]
)
def test_auto_is_native_where_the_cluster_knows_that(version: str, where: str) -> None:
    pod = pod_of(inject(job(), asked(kubernetes_version=version)))
    assert "checkpoint-sidecar" in [container["name"] for container in pod[where]]


ALONE = {"template": POD}
PARTIAL = "kueue.x-k8s.io/job-min-parallelism"
FEWER = {PARTIAL: "2", "kueue.x-k8s.io/job-completions-equal-parallelism": "true"}


@pytest.mark.parametrize(
    ("document", "count", "has_index"),
    [
        (several("Job", {"template": POD}), None, False),
        (several("Job", INDEXED), "4", False),
        (several("Job", INDEXED | {"completions": 1, "parallelism": 1}), "1", False),
        (several("Job", INDEXED | {"parallelism": 2}), None, False),
        (several("Job", {"parallelism": 3, "template": POD}), "3", False),
        (several("JobSet", {"replicatedJobs": [{"name": "a", "template": {"spec": INDEXED}}]}), "4", False),
        (several("JobSet", {"replicatedJobs": [{"name": "a", "replicas": 2, "template": {"spec": INDEXED}}]}), None, False),
        (several("JobSet", {"replicatedJobs": [{"name": "a", "replicas": 2, "template": {"spec": ALONE}}]}), "2", True),
        (several("Job", INDEXED) | {"metadata": {"name": "x", "annotations": FEWER}}, None, False),
        (several("StatefulSet", {"replicas": 3, "template": POD}), "3", True),
        (several("StatefulSet", {"template": POD}), None, False),
        (several("Deployment", {"replicas": 2, "template": POD}), "2", False),
        (several("LeaderWorkerSet", {"leaderWorkerTemplate": {"size": 5, "workerTemplate": POD}}), "5", True),
        (
            several(
                "PyTorchJob", {"pytorchReplicaSpecs": {"Master": {"template": POD}, "Worker": {"replicas": 3, "template": POD}}}
            ),
            "4",
            False,
        ),
        (several("RayCluster", {"workerGroupSpecs": [{"replicas": 2, "numOfHosts": 4, "template": POD}]}), "8", False),
    ],
)
def test_the_sidecar_knows_of_how_many_it_is_one_wherever_the_document_tells(
    document: dict[str, Any], count: str | None, has_index: bool
) -> None:
    for template in pod_templates(inject(document, STORE).document):
        env = values(sidecar_of(template["spec"]))
        assert env.get("CKPT_NODE_COUNT") == count
        assert ("CKPT_NODE_INDEX" in env) == has_index


def test_a_job_that_kueue_may_start_with_fewer_pods_must_have_as_many_indices_as_pods() -> None:
    document = several("Job", INDEXED) | {"metadata": {"name": "x", "annotations": {PARTIAL: "2"}}}
    said = [warning for warning in inject(document, STORE).warnings if "Kueue" in warning.text]
    assert [warning.path for warning in said] == ["metadata.annotations"]
    document["metadata"] = {"name": "x", "annotations": FEWER}
    assert not [warning for warning in inject(document, STORE).warnings if "Kueue" in warning.text]


RUNTIME = (KUBERNETES / "plain/runtime.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (RUNTIME, "metadata.annotations['batch.kubernetes.io/job-completion-index']"),
        (RUNTIME.replace("torch: {}", "mpi: {numProcPerNode: 1, runLauncherAsNode: true}"), None),
        (
            RUNTIME.replace("- name: node\n          template:", "- name: node\n          replicas: 2\n          template:"),
            None,
        ),
    ],
)
def test_a_pod_of_a_train_job_knows_its_index_where_that_is_certain(text: str, field: str | None) -> None:
    [document] = documents(inject_text(text, STORE).text)
    env = sidecar_of(next(iter(pod_templates(document)))["spec"])["env"]
    found = [entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in env if entry["name"] == "CKPT_NODE_INDEX"]
    assert found == ([] if field is None else [field])


@pytest.mark.parametrize("given", ["{}", "{targets: []}", "{targets: [{jobName: node, containerNames: [check]}]}"])
def test_a_runtime_of_trainer_2_3_tells_the_sidecar_the_number_of_nodes_where_it_is_asked_for(given: str) -> None:
    text = RUNTIME.replace("torch: {}", f"torch: {{envInjection: {given}}}")
    assert text != RUNTIME
    once = inject_text(text, STORE).text
    [document] = documents(once)
    [target] = document["spec"]["mlPolicy"]["torch"]["envInjection"]["targets"]
    names = ["check", "checkpoint-sidecar"] if "check" in given else ["checkpoint-sidecar"]
    assert target == {"jobName": "node", "containerNames": names}
    assert complaints(document, VERSIONS[-1]) == []
    assert inject_text(once, STORE).text == once
    [plain] = documents(inject_text(RUNTIME, STORE).text)
    assert plain["spec"]["mlPolicy"]["torch"] == {}


INDEX = {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/x']"}}}


@pytest.mark.parametrize(
    ("labels", "env", "told"),
    [
        ({}, [], {}),
        ({"batch.kubernetes.io/job-name": "x"}, [INDEX], {"JOB_COMPLETION_INDEX": "from elsewhere"}),
        (
            {"training.kubeflow.org/job-name": "x"},
            [{"name": "PET_NNODES", "value": "4"}, {"name": "PET_NODE_RANK", "value": "2"}],
            {"PET_NNODES": "4", "PET_NODE_RANK": "2"},
        ),
        ({"training.kubeflow.org/job-name": "x"}, [{"name": "PET_NNODES", "value": "$(NODES)"}], {"PET_NNODES": "1:2"}),
        ({"ray.io/cluster": "x"}, [], {"PET_NNODES": "1:2"}),
    ],
)
def test_a_pod_that_a_controller_made_says_itself_whether_it_is_the_only_one(
    labels: dict[str, str], env: list[dict[str, Any]], told: dict[str, str]
) -> None:
    spec = {"containers": [{"name": "main", "image": "i", "env": env}]}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": labels}, "spec": spec}
    done = inject(document, asked())
    found = values(sidecar_of(done.document["spec"]))
    assert {name: value for name, value in found.items() if name.startswith(("PET_", "JOB_COMPLETION"))} == told
    known = {name: value.replace("from elsewhere", "3") for name, value in found.items() if name not in OF_THE_POD}
    node = sidecar_settings(known).node
    assert node == (Node() if not told else Node(2, 4) if "PET_NODE_RANK" in told else None)
    assert inject(done.document, asked()).document == done.document
