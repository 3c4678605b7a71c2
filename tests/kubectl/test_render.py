"""The status of a job as a person reads it."""

from __future__ import annotations

import pytest

from sidecar.core.job.pods import JobPod, PodState
from sidecar.core.job.status import job_status, pod_report
from sidecar.kubectl.render import show_status


def test_a_person_sees_the_worst_first_and_a_line_for_each_pod(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {
        "phase": "running",
        "safety": {
            "level": "danger",
            "headline": "The store cannot be used: [red]x[/red]\x1b[31m",
            "sigterm": {"lost": "23 steps", "why": "the store cannot be used\x1b[31m"},
        },
        "node_count": 2,
        "newest_durable_step": 20,
        "trainer": {"step": 43},
        "at_risk": {"steps_at_risk": 23, "seconds_at_risk": 9.53, "fits_grace": False},
        "queue": [{"sent_bytes": 1 << 20, "size_bytes": 4 << 20}],
    }
    pods = [pod_report(JobPod("run-0", PodState.RUNNING, 0), answer)]
    pods.append(pod_report(JobPod("run-1", PodState.WAITING, 1, detail="0/2 nodes are available"), None))
    show_status("Job run", job_status(pods))
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("DANGER  run-0: The store cannot be used: [red]x[/red]")
    assert "\x1b" not in shown, "text of a pod is not a command for the terminal"
    for expected in (
        "also: run-1 has not started: 0/2 nodes are available",
        "Job run, 1 of 2 sidecars answer",
        "step 20, at risk: 23 steps, 9.5 s of training",
        "SIGTERM    costs 23 steps: the store cannot be used",
        "uploading  1.05 MB of 4.19 MB",
    ):
        assert expected in shown
