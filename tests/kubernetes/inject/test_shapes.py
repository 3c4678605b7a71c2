"""Files as people and tools write them: shapes/ is like the examples of Kubernetes, JobSet, Kubeflow, KubeRay and Kueue."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import pytest

from sidecar.kubernetes.inject import Options, inject_text
from sidecar.kubernetes.inject.manifests import InjectedText
from sidecar.kubernetes.inject.options import with_given
from tests.deploy.building import sidecar_of, values
from tests.deploy.schemas import VERSIONS, complaints, documents, pod_templates
from tests.marks import slow

SHAPES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "shapes").glob("*.yaml"))}
GIVEN = {"store": "s3://bucket/runs/{name}", "secret": "data-connection", "image": "registry.example/sidecar:1", "grace": "120"}
VARIANTS = {
    "native": ({}, VERSIONS),
    "hook, native": ({"install-hook": "true", "kubernetes-version": "1.33", "metrics-port": "9471"}, ("1.33",)),
    "classic": ({"mode": "classic"}, ("1.25", "1.28", "1.33")),
    "hook, classic": ({"install-hook": "true", "kubernetes-version": "1.28", "jit": "false", "save-steps": "5"}, ("1.28",)),
}


def injected(name: str, **given: str) -> InjectedText:
    chosen = GIVEN | {key.replace("_", "-"): text for key, text in given.items()}
    return inject_text(SHAPES[name], with_given(Options(), chosen))


def sidecars(name: str, **given: str) -> dict[str, dict[str, Any]]:
    """The environments of the sidecars by the name of the first container beside each."""
    found = [template["spec"] for document in documents(injected(name, **given).text) for template in pod_templates(document)]
    names = [{container["name"] for container in pod.get("initContainers", [])} for pod in found]
    beside = [pod for pod, there in zip(found, names, strict=True) if "checkpoint-sidecar" in there]
    return {pod["containers"][0]["name"]: values(sidecar_of(pod)) for pod in beside}


@pytest.mark.parametrize("variant", ["native", *slow("hook, native", "classic", "hook, classic")])
@pytest.mark.parametrize("name", SHAPES)
def test_no_line_is_lost_the_result_is_valid_and_again_changes_nothing(name: str, variant: str) -> None:
    given, versions = VARIANTS[variant]
    chosen = with_given(Options(), GIVEN | given)
    done = inject_text(SHAPES[name], chosen)
    assert inject_text(done.text, chosen).text == done.text
    diff = list(difflib.ndiff(SHAPES[name].splitlines(), done.text.splitlines()))
    assert [line for line in diff if line.startswith("- ")] == []
    before = [[complaints(document, version) for version in versions] for document in documents(SHAPES[name])]
    after = [[complaints(document, version) for version in versions] for document in documents(done.text)]
    assert after == before


def test_what_only_prepares_gets_no_sidecar_and_is_not_counted() -> None:
    found = sidecars("stages")
    assert list(found) == ["torch"]
    assert found["torch"]["CKPT_NODE_COUNT"] == "3"
    said = [warning.path for warning in injected("stages").warnings if "gets no sidecar" in warning.text]
    assert said == [f"JobSet/stages: spec.replicatedJobs[{index}].template.spec.template" for index in (0, 1)]
    named = sidecars("stages", pods="data,train")
    assert list(named) == ["fetch", "torch"]
    assert "CKPT_NODE_COUNT" not in named["torch"]


def test_what_only_launches_gets_no_sidecar() -> None:
    assert list(sidecars("mpi")) == ["worker"]
    as_worker = SHAPES["mpi"].replace("  slotsPerWorker: 1\n", "  slotsPerWorker: 1\n  runLauncherAsWorker: true\n")
    options = with_given(Options(), GIVEN | {"trainer-container": "worker"})
    assert inject_text(as_worker.replace("name: launcher", "name: worker"), options).pods == 2


def test_several_parts_of_a_set_are_said_to_be_one_run() -> None:
    alone = SHAPES["stages"].replace("status: Complete", "status: Ready")
    said = inject_text(alone, with_given(Options(), GIVEN)).warnings
    [warning] = [warning for warning in said if "as one run" in warning.text]
    assert (warning.path, warning.text[:21]) == ("JobSet/stages: spec.replicatedJobs", "data, weights, train:")


def test_a_claim_that_all_pods_of_a_set_share_is_named() -> None:
    said = injected("stages", dir="/data/checkpoints").warnings
    assert [warning.path for warning in said if "share the claim" in warning.text] == [
        "JobSet/stages: spec.replicatedJobs[2].template.spec.template.spec.volumes"
    ]


def test_workers_of_a_schedule_of_ray_jobs_are_found_and_ray_is_the_first_container() -> None:
    assert list(sidecars("ray-schedule")) == ["worker"]
    assert sidecars("ray-schedule")["worker"]["CKPT_STORE"] == "s3://bucket/runs/$(JOB_NAME)"


def test_a_run_that_may_grow_is_not_alone() -> None:
    assert sidecars("elastic")["pytorch"]["CKPT_NODE_COUNT"] == "3"
    assert sidecars("pod-group")["train"]["PET_NNODES"] == "1:2"


def test_a_runtime_of_the_same_file_is_not_asked_for() -> None:
    both = injected("runtime-and-run")
    assert both.pods == 2
    assert not [warning for warning in both.warnings if "inject it there" in warning.text]
    alone = inject_text(SHAPES["runtime-and-run"].partition("# and a run of it")[2], with_given(Options(), GIVEN))
    [warning] = [warning for warning in alone.warnings if "inject it there" in warning.text]
    assert warning.path == "TrainJob/first: spec.runtimeRef"


def test_a_name_that_the_server_makes_is_warned_of() -> None:
    text = SHAPES["elastic"].replace("  name: elastic", "  generateName: elastic-")
    said = inject_text(text, with_given(Options(), GIVEN | {"store": "s3://bucket/one"})).warnings
    assert "PyTorchJob: metadata.generateName" in [warning.path for warning in said]
    assert not [warning for warning in injected("pod-group").warnings if "generateName" in warning.path]


def test_braces_stay_braces() -> None:
    done = injected("braces")
    assert '    completionMode: "Indexed",\n    podFailurePolicy: {\n' in done.text
    assert '          secret: {\n            secretName: "data-connection",\n          },\n        }, {\n' in done.text
    flat = "{apiVersion: v1, kind: Pod, metadata: {name: x}, spec: {containers: [{name: a, image: i}]}}\n"
    assert inject_text(flat, with_given(Options(), GIVEN)).text.count("\n") == 1
