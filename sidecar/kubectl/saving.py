"""``save`` and ``pause``: every node saves at the same time."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from sidecar.core.job.pods import JobPod
from sidecar.core.job.save import JobSave, job_save
from sidecar.core.job.workloads import suspension
from sidecar.errors import NothingFound, RequestRefused, SidecarError
from sidecar.kubectl.cluster import Kubectl
from sidecar.kubectl.job import Job, at_once, running
from trainer_hook.contract.plain_text import plain_text

_PREFIX = "checkpoint-sidecar save: "


def say(text: str) -> None:
    """Show progress: a line on standard error."""
    print(plain_text(text), file=sys.stderr, flush=True)


def save(cluster: Kubectl, job: Job, *, timeout_s: float) -> JobSave:
    """Have every node save now, and wait until all of that is durable.

    Raises:
        NothingFound: No pod of the job has a sidecar that runs.
        RequestRefused: A pod has not started, so that its part of the checkpoint cannot be saved.
    """
    pods = job.pods
    able = running(pods)
    if not able:
        states = ", ".join(f"{pod.name} ({pod.state})" for pod in pods) or "none has a sidecar"
        raise NothingFound(f"no pod of {job.title} has a sidecar that runs: {states}")
    if waiting := [pod for pod in pods if pod.state == "waiting"]:
        names = ", ".join(f"{pod.name} ({pod.detail})" for pod in waiting)
        raise RequestRefused(f"{job.title} cannot be saved as a whole: {names} has not started; see 'kubectl ckpt status'")
    say(f"{job.title}: {len(able)} {'pod saves' if len(able) == 1 else 'pods save'}")
    told: set[str] = set()
    # All of them: a pod's save is durable when every node has done its part.
    answers = at_once(partial(_save, cluster, timeout_s, told), able, most=len(able))
    saved = job_save({pod.name: answer for pod, answer in zip(able, answers, strict=True)})
    for line in (f"{pod}: {problem}" for pod, problem in saved.problems.items()):
        if line not in told:
            say(line)
    return saved


def _save(cluster: Kubectl, timeout_s: float, told: set[str], pod: JobPod) -> Mapping[str, Any]:
    def on_line(line: str) -> None:
        if line.startswith(_PREFIX):
            told.add(f"{pod.name}: {line.removeprefix(_PREFIX)}")
            say(f"{pod.name}: {line.removeprefix(_PREFIX)}")

    done = cluster.follow(pod.name, "save", "--json", "--timeout", f"{timeout_s:g}s", on_line=on_line)
    answer = done.answer()
    if answer is None or "state" not in answer:
        return {"error": done.problem().removeprefix("save: ")}
    say(f"{pod.name}: {answer['checkpoint'] or 'no checkpoint'} is {answer['state']}")
    return answer


def suspend(cluster: Kubectl, job: Job) -> None:
    """Set the field that suspends the workload.

    Raises:
        SidecarError: It was not changed.
    """
    change = json.dumps(suspension(job.kind, suspends=True))
    try:
        cluster.run("patch", job.kind.resource, job.name, "--type=merge", "-p", change)
    except SidecarError as error:
        raise type(error)(f"the checkpoint is durable, but {job.title} is not suspended: {error}") from None


def continue_command(cluster: Kubectl, job: Job) -> str:
    """Return the command that lets a suspended job go on."""
    change = f"'{json.dumps(suspension(job.kind, suspends=False), separators=(',', ':'))}'"
    return " ".join(cluster.command("patch", job.kind.resource, job.name, "--type=merge", "-p", change))
