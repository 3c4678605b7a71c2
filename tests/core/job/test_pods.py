"""Which pods of a job count, as Kubernetes describes them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.job.pods import JobPod, PodState, job_pods


def pod(name: str, state: dict[str, Any], *, index: int | None = None, phase: str = "Running", at: str = "") -> dict[str, Any]:
    annotations = {} if index is None else {"batch.kubernetes.io/job-completion-index": str(index)}
    status = {"phase": phase, "initContainerStatuses": [{"name": "checkpoint-sidecar", "restartCount": 1, "state": state}]}
    container = {"name": "checkpoint-sidecar", "env": [{"name": "CKPT_DIR", "value": "/ckpt"}]}
    metadata = {"name": name, "annotations": annotations, "creationTimestamp": at}
    return {"metadata": metadata, "spec": {"initContainers": [container], "containers": [{"name": "t"}]}, "status": status}


RUNNING, ENDED = {"running": {}}, {"terminated": {"exitCode": 0, "message": "everything finished is durable\n"}}


def test_a_running_sidecar_can_be_asked() -> None:
    assert job_pods([pod("run-0-abc", RUNNING, index=0)]) == [JobPod("run-0-abc", PodState.RUNNING, 0, directory="/ckpt")]


def test_an_ended_one_says_how_unless_a_later_pod_does_its_work() -> None:
    ended = pod("run-0-old", ENDED, index=0, at="2026-01-01T00:00:00Z")
    [found] = job_pods([ended])
    assert (found.state, found.detail) == (PodState.ENDED, "everything finished is durable")
    assert [each.name for each in job_pods([ended, pod("run-0-new", RUNNING, index=0)])] == ["run-0-new"]
    assert [each.name for each in job_pods([ended, pod("run-1-new", RUNNING, index=1)])] == ["run-0-old", "run-1-new"]


def test_an_index_is_unique_within_one_job_of_a_set() -> None:
    """Each Job of a JobSet numbers its pods from 0."""
    items = [pod("run-0", ENDED, index=0), pod("run-1", ENDED, index=0), pod("run-2", RUNNING, index=0)]
    for number, item in enumerate(items):
        item["metadata"]["labels"] = {"batch.kubernetes.io/job-name": f"set-workers-{number}"}
    assert [each.name for each in job_pods(items)] == ["run-0", "run-1", "run-2"]
    items[2]["metadata"]["labels"] = items[0]["metadata"]["labels"]
    assert [each.name for each in job_pods(items)] == ["run-1", "run-2"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_was_evicted_before_its_sidecar_ended_has_ended(phase: str) -> None:
    evicted = pod("run", {}, phase=phase)
    assert (job_pods([evicted])[0].state, job_pods([evicted])[0].detail) == (PodState.ENDED, phase)
    evicted["status"]["message"] = "The node was low on resource: ephemeral-storage."
    assert job_pods([evicted])[0].detail == "The node was low on resource: ephemeral-storage."


def test_of_ended_pods_without_index_none_counts_beside_a_living_one() -> None:
    assert [each.name for each in job_pods([pod("old", ENDED), pod("new", RUNNING)])] == ["new"]


def test_a_pod_that_waits_says_why() -> None:
    waits = pod("run", {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}, phase="Pending")
    assert job_pods([waits])[0].detail == "Back-off pulling image"
    waits["status"]["conditions"] = [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]
    assert (job_pods([waits])[0].state, job_pods([waits])[0].detail) == (PodState.WAITING, "0/2 nodes are available")


@pytest.mark.parametrize(
    ("state", "status", "said"),
    [
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, {}, (PodState.ENDED, "exit code 137, OOMKilled")),
        ({"terminated": {"exitCode": 1, "message": " "}}, {}, (PodState.ENDED, "exit code 1, no reason")),
        ({}, {"phase": "Failed", "reason": "Evicted"}, (PodState.ENDED, "Evicted")),
        ({}, {"phase": "Failed", "reason": "Evicted", "message": "no space"}, (PodState.ENDED, "no space")),
        ({"waiting": {"reason": "ContainerCreating"}}, {"phase": "Pending"}, (PodState.WAITING, "ContainerCreating")),
        ({"waiting": {}}, {"phase": "Pending"}, (PodState.WAITING, "Pending")),
        ({}, {"phase": None}, (PodState.WAITING, "not started")),
        (
            {"waiting": {"reason": "r"}},
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
            (PodState.WAITING, "Unschedulable"),
        ),
        ({}, {"conditions": [{"type": "PodScheduled", "status": "False"}]}, (PodState.WAITING, "not scheduled")),
        ({"waiting": {"reason": "r"}}, {"conditions": [{"type": "PodScheduled", "status": "True"}]}, (PodState.WAITING, "r")),
    ],
)
def test_how_a_pod_ended_or_why_it_waits(state: dict[str, Any], status: dict[str, Any], said: tuple[PodState, str]) -> None:
    item = pod("run", state)
    item["status"] |= status
    [found] = job_pods([item])
    assert (found.state, found.detail) == said


def test_a_sidecar_may_be_an_ordinary_container_and_need_not_say_where_its_volume_is() -> None:
    status = {"containerStatuses": [{"name": "t"}, {"name": "checkpoint-sidecar", "restartCount": 2, "state": RUNNING}]}
    spec = {"containers": [{"name": "t"}, {"name": "checkpoint-sidecar"}]}
    at = "2026-01-01T00:00:00Z"
    ordinary = {"metadata": {"name": "run", "creationTimestamp": at}, "spec": spec, "status": status}
    bare = {"metadata": {"name": "bare"}, "spec": spec}
    assert job_pods([ordinary, bare]) == [
        JobPod("bare", PodState.WAITING, detail="not started", directory="/checkpoints", created_at=""),
        JobPod("run", PodState.RUNNING, created_at=at, directory="/checkpoints"),
    ]


@pytest.mark.parametrize(
    "label",
    [
        "batch.kubernetes.io/job-completion-index",
        "apps.kubernetes.io/pod-index",
        "leaderworkerset.sigs.k8s.io/worker-index",
    ],
)
def test_the_index_of_a_pod_is_in_a_label_or_in_its_annotation(label: str) -> None:
    item = pod("run", RUNNING, index=1)
    assert [each.index for each in job_pods([item])] == [1]
    for text, index in (("2", 2), ("-2", None), ("٢", None), ("", None)):
        item["metadata"]["labels"] = {label: text}
        assert [each.index for each in job_pods([item])] == [index]


def test_pods_are_listed_by_index_then_name_and_those_without_one_last() -> None:
    items = [pod("a", RUNNING), pod("y", RUNNING, index=1), pod("z", RUNNING, index=0), pod("x", RUNNING, index=1)]
    assert [each.name for each in job_pods(items)] == ["z", "x", "y", "a"]


def test_of_ended_pods_of_one_index_the_newest_counts() -> None:
    items = [pod("b", ENDED, index=0, at="2026-01-01T00:00:00Z"), pod("a", ENDED, index=0, at="2026-01-02T00:00:00Z")]
    assert [each.name for each in job_pods(items)] == ["a"]
    at_once = [pod(name, ENDED, index=0, at="2026-01-01T00:00:00Z") for name in ("b", "a")]
    assert [each.name for each in job_pods(at_once)] == ["b"]


def test_a_pod_without_a_sidecar_does_not_count() -> None:
    launcher = {"metadata": {"name": "launcher"}, "spec": {"containers": [{"name": "mpi"}]}, "status": {}}
    assert [each.name for each in job_pods([launcher, pod("run", RUNNING)])] == ["run"]


@pytest.mark.parametrize("missing", ["status", "spec", "metadata"])
def test_a_pod_with_a_missing_part_is_no_error(missing: str) -> None:
    found = pod("run", RUNNING)
    del found[missing]
    job_pods([found])


pods = st.builds(
    lambda name, state, index, at: pod(name, state, index=index, at=at),
    st.text("abc", min_size=1, max_size=3),
    st.sampled_from([RUNNING, ENDED, {"waiting": {}}]),
    st.none() | st.integers(0, 3),
    st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]),
)


@given(st.lists(pods, max_size=8, unique_by=lambda each: each["metadata"]["name"]), st.randoms())
def test_living_pods_all_count_and_an_index_has_one_end(items: list[dict[str, Any]], random: Any) -> None:
    found = job_pods(items)
    mixed = items.copy()
    random.shuffle(mixed)
    assert job_pods(mixed) == found
    states = {each["metadata"]["name"]: each["status"]["initContainerStatuses"][0]["state"] for each in items}
    assert {each.name for each in found} >= {name for name, state in states.items() if "terminated" not in state}
    ended = [each for each in found if each.state is PodState.ENDED and each.index is not None]
    assert len({each.index for each in ended}) == len(ended)
    assert bool(found) == bool(items)
