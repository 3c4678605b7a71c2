"""A manifest that was injected before: earlier choices stay, and only the options given now change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.main import main
from sidecar.kubernetes.inject import NotInjectable, Options, inject, inject_text
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.building import POD, asked, in_any_order, job, named, pod_of, several, sidecar_of, values
from tests.deploy.schemas import documents, pod_templates
from tests.deploy.test_kubernetes import MADE, name_of
from tests.kubernetes.inject.test_shapes import SHAPES
from tests.marks import slow

NEW = with_given(Options(), {"image": "registry.example/checkpoint-sidecar:NEW"})
SEVERAL = [{"name": "logs", "image": "l"}, {"name": "main", "image": "i"}, {"name": "proxy", "image": "p"}]


def upgraded(node: Any) -> Any:
    """The same with the image of every container of ours exchanged."""
    if isinstance(node, dict):
        changed = {key: upgraded(value) for key, value in node.items()}
        if node.get("name") in ("checkpoint-sidecar", "checkpoint-hook", "checkpoint-doctor") and "image" in node:
            changed["image"] = "registry.example/checkpoint-sidecar:NEW"
        return changed
    return [upgraded(value) for value in node] if isinstance(node, list) else node


@pytest.mark.parametrize("path", MADE, ids=name_of)
def test_the_documented_upgrade_changes_the_images_and_nothing_else(path: Path, tmp_path: Path) -> None:
    copied = tmp_path / path.name
    copied.write_text(path.read_text())
    image = "registry.example/checkpoint-sidecar:NEW"
    assert main(["inject", "-i", "-f", str(copied), "--image", image]) == 0
    assert documents(copied.read_text()) == [upgraded(document) for document in documents(path.read_text())]


@pytest.mark.parametrize("mode", ["native", *slow("classic")])
@pytest.mark.parametrize("name", SHAPES)
def test_so_it_is_with_manifests_of_others(name: str, mode: str) -> None:
    given = {"store": "s3://bucket/runs/{namespace}/{name}", "image": "x:1", "mode": mode, "install-hook": "true"}
    once = inject_text(SHAPES[name], with_given(Options(), given))
    again = inject_text(once.text, NEW)
    assert again.pods == once.pods
    assert documents(again.text) == [upgraded(document) for document in documents(once.text)]


FIRST = {
    "trainer": {"trainer_container": "main"},
    "user": {"run_as_user": "0", "trainer_container": "main"},
    "classic": {"mode": "classic", "trainer_container": "main"},
    "old cluster": {"kubernetes_version": "1.27", "trainer_container": "main"},
    "ports": {"api_port": "9999", "metrics_port": "9471", "trainer_container": "main"},
    "hook": {"install_hook": "true", "dir": "/scratch", "trainer_container": "main"},
    "identity": {"cloud_identity": "true", "trainer_container": "main", "install_hook": "true"},
    "claim": {"store": "file:///state/x", "claim": "c", "trainer_container": "main"},
}


@pytest.mark.parametrize("name", FIRST)
def test_no_choice_of_the_first_injection_is_asked_for_again_or_lost(name: str) -> None:
    once = inject(job(containers=copy.deepcopy(SEVERAL)), asked(image="x:1", **FIRST[name]))
    again = inject(once.document, NEW)
    assert again.document == upgraded(once.document)
    assert set(again.warnings) <= set(once.warnings)


def test_what_an_earlier_version_injected_tells_its_trainer_by_what_it_was_given() -> None:
    once = inject(job(containers=copy.deepcopy(SEVERAL)), asked(trainer_container="main", run_as_user="7")).document
    template = once["spec"]["template"]
    del template["metadata"]["annotations"]
    again = pod_of(inject(once, NEW))
    assert values(named(again["containers"], "main"))["CKPT_DIR"] == "/checkpoints"
    assert ["CKPT_DIR" in values(container) for container in again["containers"]] == [False, True, False]
    assert sidecar_of(again)["securityContext"]["runAsUser"] == 7


INSTALLER = {
    "name": "checkpoint-hook",
    "image": "x:1",
    "command": ["checkpoint-sidecar", "install-hook", "/checkpoints/.ckpt/hook"],
    "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
}
SKIPPED = "eks.amazonaws.com/skip-containers"


@pytest.mark.parametrize("given", [{}, {"cloud_identity": "true"}, {"doctor": "true"}])
def test_the_init_container_by_which_an_earlier_version_installed_the_hook_goes(given: dict[str, str]) -> None:
    other = {"name": "data", "image": "i"}
    once = inject(job(initContainers=[other]), asked(image="x:1", install_hook="true", **given)).document
    earlier = copy.deepcopy(once)
    template = earlier["spec"]["template"]
    template["spec"]["initContainers"].insert(0, copy.deepcopy(INSTALLER))
    ours = sidecar_of(template["spec"])
    for container in template["spec"]["initContainers"]:
        container["env"] = [entry for entry in container.get("env", []) if entry["name"] != "CKPT_INSTALL_HOOK"]
    del named(template["spec"]["initContainers"], "data")["env"]
    if "cloud_identity" in given:
        template["metadata"]["annotations"][SKIPPED] += ",checkpoint-hook"
    assert "CKPT_INSTALL_HOOK" not in values(ours)
    again = inject(earlier, NEW)
    assert values(sidecar_of(pod_of(again)))["CKPT_INSTALL_HOOK"] == "/checkpoints/.ckpt/hook"
    assert in_any_order(pod_of(again)) == in_any_order(upgraded(once)["spec"]["template"]["spec"])
    assert again.document["spec"]["template"]["metadata"] == once["spec"]["template"]["metadata"]
    assert inject(again.document, NEW).document == again.document


def test_the_difference_shows_that_the_init_container_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(OF_AN_EARLIER_VERSION)
    assert main(["inject", "-f", str(manifest), "--diff"]) == 0
    said = capsys.readouterr()
    assert "give that with --image" in said.err
    shown = said.out.splitlines()
    assert "-        - name: checkpoint-hook" in shown
    assert "-          command: [checkpoint-sidecar, install-hook, /checkpoints/.ckpt/hook]" in shown
    assert [line for line in shown if line.startswith("+ ")] == [
        "+        eks.amazonaws.com/skip-containers: trainer",
        "+            - name: CKPT_INSTALL_HOOK",
        "+              value: /checkpoints/.ckpt/hook",
    ]


OF_AN_EARLIER_VERSION = (Path(__file__).parent / "of_an_earlier_version.yaml").read_text()


def test_what_an_earlier_version_injected_gets_the_private_volume() -> None:
    once = inject(job(), asked()).document
    pod = once["spec"]["template"]["spec"]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "checkpoint-sidecar-state"]
    ours = sidecar_of(pod)
    ours["env"] = [entry for entry in ours["env"] if entry["name"] != "CKPT_STATE_DIR"]
    ours["volumeMounts"] = ours["volumeMounts"][:1]
    again = pod_of(inject(once, NEW))
    assert named(again["volumes"], "checkpoint-sidecar-state") == {"name": "checkpoint-sidecar-state", "emptyDir": {}}
    assert values(sidecar_of(again))["CKPT_STATE_DIR"] == "/state"
    assert [c["name"] for c in [*again["initContainers"], *again["containers"]] if "-state" in json.dumps(c)] == [
        "checkpoint-sidecar"
    ]


def test_a_state_volume_that_a_person_chose_stays() -> None:
    once = inject(job(), asked()).document
    pod = once["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "fast", "emptyDir": {"medium": "Memory"}})
    ours = sidecar_of(pod)
    named(ours["env"], "CKPT_STATE_DIR")["value"] = "/fast"
    named(ours["volumeMounts"], "checkpoint-sidecar-state").update(name="fast", mountPath="/fast")
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "checkpoint-sidecar-state"]
    assert inject(once, NEW).document == upgraded(once)


@pytest.mark.parametrize(
    ("directory", "store", "place"),
    [
        ("/checkpoints", "s3://bucket/x", "/state"),
        ("/state", "s3://bucket/x", "/sidecar-state"),
        ("/state/ckpt", "file:///sidecar-state/x", "/checkpoint-sidecar-state"),
        ("/x", "file:///state/y", "/sidecar-state"),
    ],
)
def test_the_private_volume_is_beside_the_others(directory: str, store: str, place: str) -> None:
    claim = {"claim": "c"} if store.startswith("file:") else {}
    pod = pod_of(inject(job(), asked(dir=directory, store=store, **claim)))
    assert values(sidecar_of(pod))["CKPT_STATE_DIR"] == place
    assert named(sidecar_of(pod)["volumeMounts"], "checkpoint-sidecar-state")["mountPath"] == place


GPU = {"limits": {"nvidia.com/gpu": 1}}


@pytest.mark.parametrize(
    ("changes", "annotations", "trainer"),
    [
        ({"main": {"resources": GPU}}, {}, "main"),
        ({"main": {"resources": {"requests": {"cpu": 4}, "limits": {"aws.amazon.com/neuroncore": "2"}}}}, {}, "main"),
        ({}, {"kubectl.kubernetes.io/default-container": "main"}, "main"),
        ({"main": {"resources": GPU}}, {"kubectl.kubernetes.io/default-container": "main"}, "main"),
        ({"main": {"resources": GPU}, "proxy": {"resources": GPU}}, {}, None),
        ({"main": {"resources": GPU}}, {"kubectl.kubernetes.io/default-container": "proxy"}, None),
        ({"main": {"resources": {"limits": {"rdma/hca": 1}}}}, {}, None),
        ({"main": {"resources": {"limits": {"nvidia.com/gpu": "0"}}}}, {}, None),
        ({}, {"kubectl.kubernetes.io/default-container": "gone"}, None),
    ],
)
def test_one_container_with_an_accelerator_or_the_default_one_trains(
    changes: dict[str, Any], annotations: dict[str, str], trainer: str | None
) -> None:
    document = job(containers=[container | changes.get(container["name"], {}) for container in SEVERAL])
    document["spec"]["template"]["metadata"] = {"annotations": annotations}
    if trainer is None:
        with pytest.raises(NotInjectable, match="which one trains, logs, main, proxy"):
            inject(document, asked())
        return
    done = inject(document, asked())
    assert "CKPT_DIR" in values(named(pod_of(done)["containers"], trainer))
    assert [str(warning) for warning in done.warnings if "taken for the trainer" in warning.text]
    again = inject(done.document, NEW)
    assert again.document == upgraded(done.document)
    assert not [warning for warning in again.warnings if "taken for the trainer" in warning.text]


def test_the_pods_that_were_chosen_stay_chosen() -> None:
    replicas = {"pytorchReplicaSpecs": {"Master": {"template": copy.deepcopy(POD)}, "Worker": {"template": copy.deepcopy(POD)}}}
    once = inject(several("PyTorchJob", replicas), asked(pods="worker", image="x:1")).document
    assert ["checkpoint-sidecar" in str(template) for template in pod_templates(once)] == [False, True]
    assert inject(once, NEW).document == upgraded(once)


def test_documents_that_were_left_out_are_left_out_again() -> None:
    redis = several("Deployment", {"template": {"spec": {"containers": [{"name": "redis", "image": "r"}]}}})
    text = "---\n".join(json.dumps(document) + "\n" for document in (redis, job()))
    once = inject_text(text, asked(only="Job", image="x:1"))
    again = inject_text(once.text, NEW)
    assert documents(again.text)[0] == redis
    assert documents(again.text) == [upgraded(document) for document in documents(once.text)]
    wrapped = {"apiVersion": "v1", "kind": "List", "items": [redis, job()]}
    carried = inject(wrapped, asked(only="Job", image="x:1")).document
    assert inject(carried, NEW).document == upgraded(carried)
    with pytest.raises(NotInjectable, match="--store is missing"):
        inject_text(text, NEW)
