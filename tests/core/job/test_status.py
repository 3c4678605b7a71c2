"""The status of a job does not depend on the order of its pods' answers, and is never better than that of its worst pod."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.job.pods import JobPod, PodState
from sidecar.core.job.status import _SEVERITY, Answered, PodReport, job_status, pod_report
from sidecar.core.lifecycle.safety import Level

steps = st.none() | st.integers(0, 10_000)
seconds = st.none() | st.floats(0, 1e6)
answers = st.builds(
    PodReport,
    pod=st.sampled_from([f"run-{index}" for index in range(8)]),
    state=st.just(Answered.YES),
    level=st.sampled_from(Level),
    headline=st.none() | st.sampled_from(["Training is safe", "The store cannot be used"]),
    node_index=st.none() | st.integers(0, 7),
    node_count=st.none() | st.integers(1, 8),
    trained_step=steps,
    durable_step=steps,
    finished_step=steps,
    steps_at_risk=steps,
    seconds_at_risk=seconds,
    fits_grace=st.none() | st.booleans(),
    sigterm=st.none() | st.sampled_from(["costs nothing", "costs 7 steps", "cost not known"]),
    sent_bytes=st.integers(0, 10**12),
    pending_bytes=st.integers(0, 10**12),
)
silences = st.builds(
    PodReport,
    pod=st.sampled_from(["run-8", "run-9"]),
    state=st.sampled_from([Answered.SILENT, Answered.WAITING, Answered.ENDED]),
    detail=st.none() | st.text(max_size=20),
    node_index=st.none() | st.integers(8, 9),
)
jobs = st.lists(answers | silences, max_size=8, unique_by=lambda pod: pod.pod)


@given(jobs, st.randoms())
def test_the_order_of_answers_does_not_matter(pods: list[PodReport], random: Any) -> None:
    mixed = pods.copy()
    random.shuffle(mixed)
    assert job_status(mixed) == job_status(pods)


@given(jobs)
def test_a_job_is_as_safe_as_its_worst_pod(pods: list[PodReport]) -> None:
    found = job_status(pods)
    worst = max((_SEVERITY.index(pod.level) for pod in pods if pod.state is Answered.YES), default=0)
    assert _SEVERITY.index(found.level) >= worst
    if found.level is Level.SAFE:
        assert pods
        assert all(pod.level is Level.SAFE and pod.state in (Answered.YES, Answered.ENDED) for pod in pods)


@given(jobs, silences)
def test_a_pod_that_says_nothing_never_makes_a_job_safer(pods: list[PodReport], silent: PodReport) -> None:
    others = [pod for pod in pods if pod.pod != silent.pod]
    before, after = job_status(others), job_status([*others, silent])
    assert after.level is not Level.SAFE
    if others:
        assert _SEVERITY.index(after.level) >= _SEVERITY.index(before.level)
    assert after.durable_step == before.durable_step, "what is durable does not depend on who is asked"
    assert after.finished_step is None
    assert after.fits_grace is not True


@given(jobs)
def test_what_one_sidecar_knows_to_be_durable_is_durable_and_the_worst_risk_counts(pods: list[PodReport]) -> None:
    found, answering = job_status(pods), [pod for pod in pods if pod.state is Answered.YES]
    durable = [pod.durable_step for pod in pods if pod.durable_step is not None]
    assert found.durable_step == (max(durable) if durable else None)
    risks = [pod.steps_at_risk for pod in answering if pod.steps_at_risk is not None]
    assert found.steps_at_risk == (max(risks) if risks else None)
    if any(pod.fits_grace is False for pod in answering):
        assert found.fits_grace is False
    costs = {pod.fits_grace: pod.sigterm for pod in answering if pod.sigterm}
    assert (found.sigterm is None) == (not costs)
    if False in costs:
        assert found.sigterm in [pod.sigterm for pod in answering if pod.fits_grace is False], "of the pod that loses most"
    if found.finished_step is not None:
        assert all(pod.finished_step is not None and pod.finished_step >= found.finished_step for pod in answering)
    assert found.pending_bytes == sum(pod.pending_bytes for pod in answering)


@given(jobs)
def test_every_pod_that_needs_attention_is_named(pods: list[PodReport]) -> None:
    found = job_status(pods)
    said = " ".join([found.headline, *found.reasons])
    for pod in pods:
        if pod.state is not Answered.YES:
            assert pod.pod in said
    json.dumps(asdict(found))


@given(st.dictionaries(st.sampled_from(["safety", "phase", "node_index", "newest_durable_step", "other"]), st.none()))
def test_an_answer_of_another_version_is_read_as_far_as_it_goes(answer: dict[str, Any]) -> None:
    report = pod_report(JobPod("run-0", PodState.RUNNING, 0), answer)
    assert report.state is Answered.YES
    assert job_status([report]).level is not Level.SAFE


@pytest.mark.parametrize(
    ("state", "error", "report"),
    [
        (PodState.WAITING, None, (Answered.WAITING, "0/2 nodes are available")),
        (PodState.RUNNING, "no answer within 10 s", (Answered.SILENT, "no answer within 10 s")),
        (PodState.RUNNING, None, (Answered.SILENT, "0/2 nodes are available")),
    ],
)
def test_a_pod_without_an_answer_says_why(state: PodState, error: str | None, report: tuple[Answered, str]) -> None:
    found = pod_report(JobPod("run-0", state, 0, detail="0/2 nodes are available"), None, error)
    assert (found.state, found.detail, found.node_index) == (*report, 0)
    assert job_status([found]).level is not Level.SAFE


def test_the_status_of_two_nodes() -> None:
    answer = {
        "phase": "running",
        "safety": {"level": "safe", "headline": "Training is safe", "reasons": []},
        "node_count": 2,
        "newest_durable_step": 20,
        "newest_finished_step": 40,
        "trainer": {"step": 43},
        "at_risk": {"steps_at_risk": 23, "seconds_at_risk": 9.5, "fits_grace": True},
        "queue": [{"sent_bytes": 5, "size_bytes": 10}],
    }
    later = answer | {"newest_durable_step": 40, "at_risk": {"steps_at_risk": 3, "seconds_at_risk": 1.0, "fits_grace": True}}
    pods = [JobPod(f"run-{index}", PodState.RUNNING, index) for index in range(2)]
    both = job_status([pod_report(pods[0], answer), pod_report(pods[1], later)])
    assert (both.level, both.headline, both.reasons) == (Level.SAFE, "Training is safe", ())
    assert (both.durable_step, both.finished_step, both.trained_step, both.steps_at_risk) == (40, 40, 43, 23)
    assert (both.sent_bytes, both.pending_bytes, both.fits_grace) == (10, 20, True)
    one = job_status([pod_report(pods[0], answer)])
    assert (one.level, one.pods_wanted, one.fits_grace) == (Level.UNKNOWN, 2, None)
    assert one.headline == "1 of 2 pods are not there"


def test_what_a_sidecar_says_is_in_its_report() -> None:
    answer = {
        "phase": "running",
        "safety": {
            "level": "attention",
            "headline": "Uploads wait",
            "sigterm": {"lost": "23 steps", "why": "the store cannot be used"},
        },
        "node_index": 3,
        "node_count": 4,
        "newest_durable_step": 20,
        "newest_finished_step": 40,
        "trainer": {"step": 43},
        "at_risk": {"steps_at_risk": 23, "seconds_at_risk": 9.5, "fits_grace": True},
        "queue": [{"sent_bytes": 5, "size_bytes": 10}, {"sent_bytes": None, "size_bytes": None}],
    }
    pod = JobPod("run-1", PodState.RUNNING, 1)
    assert pod_report(pod, answer) == PodReport(
        "run-1",
        Answered.YES,
        level=Level.ATTENTION,
        headline="Uploads wait",
        phase="running",
        node_index=3,
        node_count=4,
        trained_step=43,
        durable_step=20,
        finished_step=40,
        steps_at_risk=23,
        seconds_at_risk=9.5,
        fits_grace=True,
        sigterm="costs 23 steps: the store cannot be used",
        sent_bytes=5,
        pending_bytes=10,
    )
    assert pod_report(pod, {}) == PodReport("run-1", Answered.YES, node_index=1)
    degraded = pod_report(pod, {"safety": {"level": "new"}, "degraded_reason": "no store"})
    assert (degraded.level, degraded.headline) == (Level.UNKNOWN, "no store")
    assert pod_report(JobPod("run-1", PodState.ENDED, 1), None) == PodReport("run-1", Answered.ENDED, node_index=1)


def test_pods_are_listed_by_the_index_of_their_node() -> None:
    indices = {"a": None, "z": 0, "y": 1, "x": 1}
    reports = [PodReport(name, Answered.YES, node_index=index) for name, index in indices.items()]
    assert [pod.pod for pod in job_status(reports).pods] == ["z", "x", "y", "a"]


def test_findings_are_listed_by_severity_and_name_the_pods_that_do_not_speak_for_all() -> None:
    worse = PodReport("b", Answered.YES, level=Level.DANGER, headline="No store", node_count=5, finished_step=40)
    safe = PodReport("a", Answered.YES, level=Level.SAFE, headline="Training is safe", finished_step=20)
    silent, waits = PodReport("c", Answered.SILENT), PodReport("d", Answered.WAITING, "pending")
    found = job_status([safe, worse, silent, waits])
    assert (found.level, found.headline) == (Level.DANGER, "b: No store")
    assert found.reasons == (
        "The sidecar of c does not answer: no reason given",
        "1 of 5 pods are not there",
        "d has not started: pending",
    )
    assert (found.pods_wanted, found.pods_answering) == (5, 2)
    assert job_status([safe, worse]).finished_step is None
    both = job_status([safe, replace(worse, node_count=2)])
    assert (both.finished_step, both.headline, both.reasons) == (20, "b: No store", ())


def test_a_job_of_which_nothing_is_known_is_not_safe() -> None:
    nothing = job_status([])
    assert (nothing.level, nothing.headline, nothing.reasons) == (Level.UNKNOWN, "No pod of the job has a sidecar", ())
    silent = job_status([pod_report(JobPod("a", PodState.RUNNING), {}), pod_report(JobPod("b", PodState.RUNNING), {})])
    assert silent.headline == "The sidecar does not say how safe training is"
    ended = [PodReport(pod, Answered.ENDED, "everything finished is durable", level=Level.SAFE) for pod in ("a", "b")]
    found = job_status(ended)
    assert (found.level, found.reasons) == (Level.SAFE, ("b has ended: everything finished is durable",))
    assert (found.fits_grace, found.finished_step, found.pods_answering) == (None, None, 0)


@pytest.mark.parametrize(
    ("message", "level", "step"),
    [
        ("everything finished is durable; newest durable step: 80", Level.SAFE, 80),
        ("given up: checkpoint-90 (no time). newest durable step: 80. Raise terminationGracePeriodSeconds", Level.UNKNOWN, 80),
        ("exit code 137, OOMKilled", Level.UNKNOWN, None),
    ],
)
def test_an_ended_pod_counts_by_its_termination_message(message: str, level: Level, step: int | None) -> None:
    found = job_status([pod_report(JobPod("run-0", PodState.ENDED, 0, detail=message), None)])
    assert (found.level, found.durable_step, found.headline) == (level, step, f"run-0 has ended: {message}")
