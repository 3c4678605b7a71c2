from __future__ import annotations

import copy
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from ruamel.yaml import YAML

from sidecar.cli import _parser, main
from sidecar.errors import ConfigurationError
from sidecar.inject import Injected, NotInjectable, Options, inject, inject_text
from sidecar.inject.options import with_given
from sidecar.settings import from_environment as sidecar_settings
from tests.deploy.pods import PLAIN, options, workloads
from tests.deploy.schemas import OLD_VERSIONS, VERSIONS, complaints, documents, pod_templates
from trainer_hook.contract import Node
from trainer_hook.settings import from_environment as hook_settings

STORE = Options(store="s3://bucket/runs/{name}")


def asked(**given: str) -> Options:
    return with_given(Options(), {name.replace("_", "-"): value for name, value in ({"store": "s3://b/run"} | given).items()})


def job(**pod: Any) -> dict[str, Any]:
    containers = [{"name": "main", "image": "i", "env": [{"name": "CKPT_HOOK", "value": "auto"}]}]
    spec = {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 120, "securityContext": {"runAsUser": 1000}}
    spec |= {"containers": containers, **pod}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run"}, "spec": {"template": {"spec": spec}}}


def pod_of(done: Injected) -> dict[str, Any]:
    [template] = pod_templates(done.document)
    return template["spec"]


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    return named([*pod.get("initContainers", []), *pod["containers"]], "checkpoint-sidecar")


def values(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", "from elsewhere") for entry in container.get("env", [])}


# --- properties


@examples(max_examples=60)
@given(workloads(), options())
def test_injecting_again_changes_nothing_and_the_argument_is_left_alone(
    document: dict[str, Any], wanted: dict[str, str]
) -> None:
    before = copy.deepcopy(document)
    once = inject(document, with_given(Options(), wanted))
    assert document == before
    again = inject(once.document, with_given(Options(), wanted))
    assert again.document == once.document
    assert once.pods == again.pods == 1


@examples(max_examples=40)
@given(workloads(), options(), st.sampled_from(VERSIONS))
def test_what_comes_out_is_valid_for_every_version_of_kubernetes(
    document: dict[str, Any], wanted: dict[str, str], version: str
) -> None:
    done = inject(document, with_given(Options(), wanted))
    assert complaints(done.document, version) == []


@examples(max_examples=60)
@given(workloads(), options())
def test_what_a_person_wrote_stays_as_it_was(document: dict[str, Any], wanted: dict[str, str]) -> None:
    """All but the trainer's environment, its mounts and the volumes' list is untouched, and those grow or change ours."""
    done = inject(document, with_given(Options(), wanted))
    [old], [new] = pod_templates(document), pod_templates(done.document)
    for key in ("initContainers", "containers"):
        for container in old["spec"].get(key, []):
            now = named(new["spec"][key], container["name"])
            assert {k: v for k, v in now.items() if k not in ("env", "volumeMounts")} == {
                k: v for k, v in container.items() if k not in ("env", "volumeMounts")
            }
            theirs = [entry for entry in container.get("env", []) if not re.match("CKPT_|PYTHONPATH", entry["name"])]
            assert [entry for entry in now.get("env", []) if entry in theirs] == theirs
            assert now.get("volumeMounts", [])[: len(container.get("volumeMounts", []))] == container.get("volumeMounts", [])
    assert new["spec"].get("volumes", [])[: len(old["spec"].get("volumes", []))] == old["spec"].get("volumes", [])


@examples(max_examples=30)
@given(workloads(), options(), st.sampled_from([2, 4]), st.sampled_from([0, 2]), st.integers())
def test_text_keeps_its_lines_and_its_comments_whatever_its_style(
    document: dict[str, Any], wanted: dict[str, str], mapping: int, offset: int, seed: int
) -> None:
    text = _written(document, mapping, offset, random.Random(seed))
    chosen = with_given(Options(), wanted)
    once = inject_text(text, chosen)
    assert documents(once.text) == [inject(document, chosen).document]
    assert inject_text(once.text, chosen).text == once.text
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("# ")]
    assert [line.strip() for line in once.text.splitlines() if line.strip().startswith("# ")] == comments


def _written(document: dict[str, Any], mapping: int, offset: int, chance: random.Random) -> str:
    yaml = YAML(pure=True)
    yaml.indent(mapping=mapping, sequence=2 + offset, offset=offset)
    stream = io.StringIO()
    yaml.dump(json.loads(json.dumps(document)), stream)
    lines = ["# of a person"]
    in_text = False
    for line in stream.getvalue().splitlines():
        in_text = (in_text and not line.strip()) or line.rstrip().endswith(("|-", "|", ">-"))
        if not in_text and re.match(r" *(- )?[A-Za-z]+: ?\S*$", line) and chance.random() < 0.2:
            lines.append(" " * (len(line) - len(line.lstrip())) + f"# {len(lines)}")
        lines.append(line)
    return "\n".join(lines) + "\n"


# --- every kind


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_every_plain_manifest_gets_valid_sidecars_and_loses_no_line(name: str) -> None:
    given = STORE if name != "runtime" else asked()
    done = inject_text(PLAIN[name], with_given(given, {"install-hook": "true", "secret": "s"}))
    assert done.pods >= 1
    assert inject_text(done.text, with_given(given, {"install-hook": "true", "secret": "s"})).text == done.text
    for document in documents(done.text):
        if document["metadata"]["name"] != "any":  # a patch, not a whole Job
            assert [said for version in VERSIONS for said in complaints(document, version)] == []
    kept = iter(done.text.splitlines())
    lost = [line for line in PLAIN[name].splitlines() if line not in kept and "[]" not in line]
    assert lost == []


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_before_native_sidecars_the_result_is_valid_too(version: str) -> None:
    done = inject_text(PLAIN["job-classic"], with_given(STORE, {"kubernetes-version": version, "install-hook": "true"}))
    [document] = documents(done.text)
    assert complaints(document, version) == []
    pod = document["spec"]["template"]["spec"]
    assert [c["name"] for c in pod["containers"]] == ["trainer", "checkpoint-sidecar"]
    assert values(sidecar_of(pod))["CKPT_MODE"] == "classic"


CARRIED = """\
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Service, metadata: {name: s}, spec: {ports: [{port: 0644}]}}   # left
- apiVersion: batch/v1
  kind: Job
  metadata: {name: one}
  spec: {template: {spec: {containers: [{name: t, image: i}]}}}
- apiVersion: workload.codeflare.dev/v1beta2
  kind: AppWrapper
  metadata: {name: two}
  spec:
    components:
    - template:
        apiVersion: kubeflow.org/v1
        kind: PyTorchJob
        metadata: {name: inner}
        spec:
          pytorchReplicaSpecs:
            Worker: {replicas: 1, template: {spec: {containers: [{name: helper, image: h}, {name: pytorch, image: i}]}}}
"""


def test_lists_and_wrappers_are_looked_into_and_each_run_has_its_own_prefix() -> None:
    done = inject_text(CARRIED, STORE)
    [document] = documents(done.text)
    service, plain, wrapper = document["items"]
    assert service["spec"]["ports"] == [{"port": 644}]
    assert "{port: 0644}" in done.text
    stores = [values(sidecar_of(template["spec"]))["CKPT_STORE"] for template in pod_templates(document)]
    assert stores == ["s3://bucket/runs/one", "s3://bucket/runs/inner"]
    trainers = named(next(iter(pod_templates(wrapper)))["spec"]["containers"], "pytorch")
    assert values(trainers)["CKPT_DIR"] == "/checkpoints"
    assert plain["spec"]["podReplacementPolicy"] == "Failed"
    paths = {
        warning.path.removeprefix("List: ").rpartition(".spec.template" if "items[1]" in warning.path else ".spec.pytorch")[0]
        for warning in done.warnings
    }
    assert paths == {"items[1]", "items[2].spec.components[0].template"}
    assert inject_text(done.text, STORE).text == done.text


def test_documents_without_pods_keep_every_character() -> None:
    other = "--- # first\n# nothing\n---\napiVersion: v1\nkind: ConfigMap\nmetadata:   {name: x}\ndata: {a: ~,  b: yes}\n"
    text = other + "---\n" + PLAIN["job"]
    assert inject_text(text, STORE).text.startswith(other + "---\n# A training")
    assert inject_text(text.replace("\n", "\r\n"), STORE).text == inject_text(text, STORE).text.replace("\n", "\r\n")


def test_a_file_with_other_workloads_is_told_which_one_trains() -> None:
    redis = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "redis"}, "spec": {"template": POD}}
    wrapped = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [redis, job(), {"apiVersion": "x/v1", "kind": "Other", "spec": POD}],
    }
    for only in ("Job", "Job/run", "Pod,Job/run"):
        done = inject(wrapped, asked(only=only))
        assert done.pods == 1
        assert done.document["items"] == [redis, inject(job(), asked()).document, wrapped["items"][2]]
    with pytest.raises(NotInjectable, match="nothing here has pods"):
        inject_text(json.dumps(wrapped), asked(only="Job/other"))


def test_a_claim_that_the_workload_makes_is_a_volume() -> None:
    pod = {
        "spec": {"containers": [{"name": "t", "image": "i", "volumeMounts": [{"name": "data", "mountPath": "/checkpoints"}]}]}
    }
    claims = [{"metadata": {"name": "data"}, "spec": {}}]
    for document in (
        several("StatefulSet", {"template": pod, "volumeClaimTemplates": claims}),
        several(
            "JobSet",
            {
                "replicatedJobs": [{"name": "a", "template": {"spec": {"template": pod}}}],
                "volumeClaimPolicies": [{"templates": claims}],
            },
        ),
    ):
        [template] = pod_templates(inject(document, STORE).document)
        assert named(sidecar_of(template["spec"])["volumeMounts"], "data")["mountPath"] == "/checkpoints"
        assert "volumes" not in template["spec"]


MERGED = """\
apiVersion: batch/v1
kind: Job
metadata: {name: run}
spec:
  template:
    metadata: &shared
      labels: {team: ünïcode}
    spec:
      containers:
        - &base
          name: main   # it trains
          image: i
          env: &env
            - {name: A, value: "on"}
          args:
            - |
              first
                --- second   # no comment
        - <<: *base
          name: other
          args: [x]
"""


def test_anchors_and_merge_keys_mean_what_they_meant() -> None:
    """What two containers share by an anchor, such as an environment, they still share: so the other one gets it, too."""
    chosen = asked(trainer_container="main", grace="90")
    done = inject_text(MERGED, chosen)
    [document] = documents(done.text)
    main_, other = document["spec"]["template"]["spec"]["containers"]
    assert values(main_) == values(other) | {"A": "on"}
    assert main_["args"] == ["first\n  --- second   # no comment\n"]
    assert other["args"] == ["x"]
    assert "          name: main   # it trains\n" in done.text
    assert inject_text(done.text, chosen).text == done.text


def test_json_stays_json() -> None:
    text = json.dumps(job(), indent=4)
    done = inject_text(text, STORE)
    assert json.loads(done.text) == inject(job(), STORE).document
    assert inject_text(done.text, STORE).text == done.text


# --- what a pod gets


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
    of_sidecar = {k: v for k, v in values(sidecar_of(pod)).items() if k != "CKPT_CREDENTIALS_DIR"}
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


def test_the_commands_of_the_sidecar_are_commands_of_this_program() -> None:
    sidecar = sidecar_of(pod_of(inject(job(), STORE)))
    probes = [sidecar[probe]["exec"]["command"] for probe in ("startupProbe", "readinessProbe")]
    for command in [sidecar["command"], sidecar["lifecycle"]["preStop"]["exec"]["command"], *probes]:
        assert command[0] == "checkpoint-sidecar"
        assert _parser().parse_args(command[1:]).name == command[1]


def test_the_hook_that_the_init_container_installs_is_active_in_the_trainer(tmp_path: Path) -> None:
    pod = pod_of(inject(job(), asked(install_hook="true", dir=str(tmp_path))))
    [_, *install] = named(pod["initContainers"], "checkpoint-hook")["command"]
    subprocess.run([sys.executable, "-m", "sidecar", *install], check=True, capture_output=True, timeout=60)
    look = "import sys; print('trainer_hook.boot' in sys.modules, sys.modules['sitecustomize'].__file__)"
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
    assert template["metadata"]["annotations"]["eks.amazonaws.com/skip-containers"] == "data,main,checkpoint-hook"


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
    assert pod["initContainers"][0]["command"][-1] == "/checkpoints/.ckpt/hook"


def test_the_sidecar_is_the_first_init_container_and_runs_as_the_trainer() -> None:
    document = job(initContainers=[{"name": "data", "image": "i"}])
    document["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {"runAsUser": 1234, "runAsGroup": 99}
    pod = pod_of(inject(document, STORE))
    assert [c["name"] for c in pod["initContainers"]] == ["checkpoint-sidecar", "data"]
    secured = sidecar_of(pod)["securityContext"]
    assert (secured["runAsUser"], secured["runAsGroup"], secured["runAsNonRoot"]) == (1234, 99, True)
    assert secured["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_of_class_guaranteed_stays_one() -> None:
    document = job()
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "8", "memory": "64Gi"}}
    resources = sidecar_of(pod_of(inject(document, STORE)))["resources"]
    assert resources["limits"] == resources["requests"]
    assert set(resources["limits"]) == {"cpu", "memory"}


def test_what_people_added_to_the_sidecar_stays_and_what_was_chosen_before_too() -> None:
    once = inject(job(), asked(store="s3://b/first", image="registry/sidecar:1"))
    sidecar = sidecar_of(pod_of(once))
    sidecar["resources"] = {"requests": {"memory": "1Gi"}}
    sidecar["env"].append({"name": "AWS_CA_BUNDLE", "value": "/ca.pem"})
    again = sidecar_of(pod_of(inject(once.document, with_given(Options(), {"grace": "300"}))))
    assert again["resources"] == {"requests": {"memory": "1Gi"}}
    assert again["image"] == "registry/sidecar:1"
    assert values(again) == {**values(sidecar), "CKPT_GRACE_SECONDS": "300"}


def test_native_and_classic_are_changed_into_each_other() -> None:
    native = inject(job(), asked(mode="native", install_hook="true")).document
    classic = inject(native, asked(mode="classic", install_hook="true"))
    pod = pod_of(classic)
    assert [c["name"] for c in pod["initContainers"]] == ["checkpoint-hook"]
    assert "restartPolicy" not in sidecar_of(pod)
    back = inject(classic.document, asked(mode="native", install_hook="true"))
    assert pod_of(back) == pod_of(inject(native, asked(mode="native", install_hook="true")))


@pytest.mark.parametrize(
    ("version", "where"), [("1.28", "containers"), ("1.29", "initContainers"), ("v1.31.4-gke.1", "initContainers")]
)
def test_auto_is_native_where_the_cluster_knows_that(version: str, where: str) -> None:
    pod = pod_of(inject(job(), asked(kubernetes_version=version)))
    assert "checkpoint-sidecar" in [container["name"] for container in pod[where]]


# --- one of how many


def several(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    group = {"Job": "batch/v1", "StatefulSet": "apps/v1", "Deployment": "apps/v1", "JobSet": "jobset.x-k8s.io/v1alpha2"}
    group |= {"PyTorchJob": "kubeflow.org/v1", "RayCluster": "ray.io/v1", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1"}
    return {"apiVersion": group[kind], "kind": kind, "metadata": {"name": "x"}, "spec": spec}


POD = {"spec": {"containers": [{"name": "pytorch", "image": "i"}]}}
INDEXED = {"completionMode": "Indexed", "completions": 4, "parallelism": 4, "template": POD}


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


# --- what would bite


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
    assert {name: value for name, value in found.items() if name.startswith(("PET_", "JOB_"))} == told
    node = sidecar_settings({name: value.replace("from elsewhere", "3") for name, value in found.items()}).node
    assert node == (Node() if not told else Node(2, 4) if "PET_NODE_RANK" in told else None)
    assert inject(done.document, asked()).document == done.document


def in_pod(path: str, value: Any, **more: Any) -> dict[str, Any]:
    """A Job whose document was changed at one path of its pod."""
    document = job(**more)
    here: Any = document["spec"]["template"]["spec"]
    *way, last = path.split(".")
    for step in way:
        here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
    if value is None:
        del here[last]
    else:
        here[last] = value
    return document


def with_volume(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    mounts = [{"name": "v", "mountPath": "/checkpoints", **mount}]
    return in_pod("containers.0.volumeMounts", mounts, volumes=[{"name": "v", **volume}])


def in_job(**fields: Any) -> dict[str, Any]:
    document = job()
    document["spec"] |= fields
    return document


TRAPS = {
    "grace": (in_pod("terminationGracePeriodSeconds", None), {}, "terminationGracePeriodSeconds: is not set"),
    "sub-path": (with_volume({"emptyDir": {}}, subPath="x"), {}, "containers[0].volumeMounts: subPath"),
    "size limit": (with_volume({"emptyDir": {"sizeLimit": "1Gi"}}), {}, "volumes: v: sizeLimit"),
    "memory": (with_volume({"emptyDir": {"medium": "Memory"}}), {}, "memory limits"),
    "taken name": (job(volumes=[{"name": "checkpoints", "emptyDir": {}}]), {}, "has a volume 'checkpoints'"),
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
    "replacement": (in_job(podReplacementPolicy="TerminatingOrFailed"), {}, "spec.podReplacementPolicy"),
    "exit codes": (
        in_job(podFailurePolicy={"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}]}),
        {},
        "rules[0].onExitCodes: without containerName",
    ),
    "backoff": (in_job(backoffLimit=0), {}, "spec.backoffLimit: 0"),
    "no index": (in_job(parallelism=3), {}, "spec.completionMode"),
    "no hook": (in_pod("containers.0.env", None), {}, "nothing here starts the hook"),
    "python path": (job(), {"install_hook": "true"}, "env: PYTHONPATH"),
    "shell": (in_pod("containers.0.command", ["sh", "-c", "cd /x && python t.py"]), {}, "may keep SIGTERM to itself"),
    "credentials": (
        in_pod("containers.0.envFrom", [{"secretRef": {"name": "s"}}]),
        {"secret": "s"},
        "containers[0].envFrom[0]",
    ),
    "image": (job(), {"image": None}, "name your registry's"),
    "rollout": (several("Deployment", {"template": job()["spec"]["template"]}), {}, "spec.strategy"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_what_would_bite_is_said_with_its_place(name: str) -> None:
    document, given, text = TRAPS[name]
    chosen = asked(**{key: value for key, value in ({"image": "registry/x:1"} | given).items() if value is not None})
    said = [str(warning) for warning in inject(document, chosen).warnings]
    assert [line for line in said if text in line] == said[:1], said
    assert len(said) == 1


def test_a_pod_without_traps_has_no_warnings() -> None:
    assert inject(job(), asked(image="registry/x:1")).warnings == ()


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
    "windows": (in_pod("os", {"name": "windows"}), {}, "os.name: the sidecar needs Linux"),
    "no store": (job(), {"store": None}, "--store is missing"),
    "no name": ({**job(), "metadata": {}}, {"store": "s3://b/{name}"}, "metadata.name: is missing"),
    "other cluster": (
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": {"clusterSelector": {"ray.io/cluster": "c"}}},
        {},
        "spec.clusterSelector",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_understood_is_refused_with_its_place(name: str) -> None:
    document, given, text = REFUSALS[name]
    chosen = {key.replace("_", "-"): value for key, value in ({"store": "s3://b/run"} | given).items() if value is not None}
    with pytest.raises(NotInjectable, match=re.escape(text)):
        inject(document, with_given(Options(), chosen))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"store": "gs://b"}, "--store='gs://b' must be s3://"),
        ({"kubernetes-version": "new"}, "must be a version such as 1.31"),
        ({"grace": "0"}, "--grace='0' must be a whole number"),
        ({"wrong": "x"}, "--wrong is not an option"),
        ({"CKPT_KEEP_STOER": "1"}, "did you mean CKPT_KEEP_STORE?"),
        ({"CKPT_GRACE_SECONDS": "9"}, "use --grace"),
        ({"claim": "c", "store": "s3://b/x"}, "--claim is for a file:// store"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        with_given(Options(), given)


def test_text_that_is_no_yaml_is_refused_with_its_line() -> None:
    with pytest.raises(NotInjectable, match=r"line 3 of the document: .*template must be rendered"):
        inject_text("kind: Job\nspec: {{ .Values.spec }}\n  x: [\n", STORE)
    with pytest.raises(NotInjectable, match="nothing here has pods"):
        inject_text("kind: Service\napiVersion: v1\n", STORE)


# --- the command


def test_the_command_prints_the_difference_writes_in_place_and_says_what_bites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(PLAIN["job"])
    chosen = ["--store", "s3://b/{name}", "--grace", "90", "--save-steps", "5", "--jit", "true", "--set", "CKPT_KEEP_STORE=4"]
    assert main(["inject", "-f", str(place), "--diff", *chosen]) == 0
    out, err = capsys.readouterr()
    assert "+      terminationGracePeriodSeconds: 90" in out.splitlines()
    assert not [line for line in out.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert f"warning: {place}: Job/llama: spec.template.spec.containers[0]: nothing here starts the hook" in err
    assert main(["inject", "-f", str(place), "-i", *chosen]) == 0
    once = place.read_text()
    assert main(["inject", "-f", str(place), "-i", *chosen]) == 0
    assert place.read_text() == once == inject_text(PLAIN["job"], with_given(Options(), _given(chosen))).text
    assert capsys.readouterr().out == ""


def _given(arguments: list[str]) -> dict[str, str]:
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return dict(value.split("=") if name == "--set" else (name[2:], value) for name, value in pairs)


def test_standard_input_goes_to_standard_output(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PLAIN["jobset"]))
    assert main(["inject", "-f", "-", "--store", "s3://bucket/runs/{name}"]) == 0
    assert capsys.readouterr().out == inject_text(PLAIN["jobset"], STORE).text


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--store", "ftp://x"], 2, "must be s3://bucket/prefix"),
        (["--set", "KEEP=1"], 2, "must be CKPT_NAME=VALUE"),
        (["--set", "CKPT_VERIFY=maybe"], 2, "CKPT_VERIFY='maybe'"),
        (
            ["--store", "s3://b/x", "--trainer-container", "nobody"],
            1,
            "job.yaml: spec.template: no pod has a container 'nobody'",
        ),
    ],
)
def test_a_refusal_writes_nothing(
    arguments: list[str], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "job.yaml"
    place.write_text(PLAIN["job"])
    assert main(["inject", "-i", "-f", str(place), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert text in err
    assert place.read_text() == PLAIN["job"]
