"""``bundle``: what is needed to find out later what happened to a job, without secrets, in one archive."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from sidecar import __version__
from sidecar.core.job.pods import SIDECAR, JobPod, PodState
from sidecar.core.job.scrub import scrubbed_answer, scrubbed_object, scrubbed_text
from sidecar.core.job.status import job_status, pod_report
from sidecar.core.job.workloads import owner_of, why_no_pods
from sidecar.errors import SidecarError
from sidecar.kubectl.cluster import Kubectl
from sidecar.kubectl.job import ASK_S, Job, at_once, outermost

HOOK = "checkpoint-hook"
LOG_BYTES = 10_000_000
LOG_LINES = 100_000
"""Limits of one container's log: its end, where the exit report is."""
EXIT_REPORT = ".ckpt/exit-report.json"
Files = dict[str, str]


def write_bundle(cluster: Kubectl, job: Job, path: Path, *, trainer_logs: bool) -> list[str]:
    """Write the archive, readable by its owner alone.

    Returns:
        The names in it. What could not be had is named in ``missing.txt`` with the reason.

    Raises:
        OSError: The archive cannot be written.
    """
    files, missing = _collected(cluster, job, trainer_logs=trainer_logs)
    files["missing.txt"] = "".join(f"{name}: {why}\n" for name, why in sorted(missing.items())) or "nothing is missing\n"
    root = f"{job.kind.kind.lower()}-{job.name}"
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, text in sorted(files.items()):
                _add(archive, f"{root}/{name}", text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return sorted(files)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode(errors="replace")
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(content))


def _collected(cluster: Kubectl, job: Job, *, trainer_logs: bool) -> tuple[Files, Files]:
    files: Files = {"about.json": _json({"made_by": f"kubectl-ckpt {__version__}", "job": job.title, "at": _now()})}
    missing: Files = {}
    objects = {pod["metadata"]["name"]: pod for pod in job.pod_objects}
    for found, absent in at_once(partial(_of_pod, cluster, objects, trainer_logs), job.pods):
        files |= found
        missing |= absent
    reports = [
        pod_report(pod, _status_in(files, pod), missing.get(f"pods/{pod.name}/status.json"))
        if pod.state is PodState.RUNNING
        else pod_report(pod, None)
        for pod in job.pods
    ]
    files["status.json"] = _json(asdict(job_status(reports, without_pods=why_no_pods(job.workload))))
    files["workload.json"] = _json(scrubbed_object(job.workload))
    if owner_of(job.workload) is not None:
        _take("owner.json", partial(_owner, cluster, job), files, missing)
    _take("events.txt", partial(_events, cluster, {job.name, *objects}), files, missing)
    return files, missing


def _owner(cluster: Kubectl, job: Job) -> str:
    return _json(scrubbed_object(outermost(cluster, job).workload))


def _status_in(files: Files, pod: JobPod) -> dict[str, Any] | None:
    text = files.get(f"pods/{pod.name}/status.json")
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def _take(name: str, read: Callable[[], str], files: Files, missing: Files) -> None:
    try:
        files[name] = read()
    except SidecarError as error:
        missing[name] = scrubbed_text(str(error))


def _of_pod(cluster: Kubectl, objects: dict[str, dict[str, Any]], trainer_logs: bool, pod: JobPod) -> tuple[Files, Files]:
    found = objects[pod.name]
    files: Files = {}
    missing: Files = {}
    folder = f"pods/{pod.name}"
    files[f"{folder}/pod.json"] = _json(scrubbed_object(found))
    if pod.state is PodState.RUNNING:
        for name in ("status", "ls"):
            _take(f"{folder}/{name}.json", partial(_asked, cluster, pod, name), files, missing)
        _take(f"{folder}/exit-report.json", partial(_exit_report, cluster, pod), files, missing)
    for container, previous in _logs(found, trainer_logs=trainer_logs):
        name = f"{folder}/logs/{container}{'.previous' if previous else ''}.log"
        _take(name, partial(_log, cluster, pod.name, container, previous=previous), files, missing)
    return files, missing


def _asked(cluster: Kubectl, pod: JobPod, command: str) -> str:
    done = cluster.ask(pod.name, command, "--json", timeout_s=ASK_S)
    answer = done.answer()
    if done.code or answer is None:
        raise SidecarError(done.problem())
    return _json(scrubbed_answer(answer))


def _exit_report(cluster: Kubectl, pod: JobPod) -> str:
    """Return the report of the sidecar's latest end on this volume."""
    path = f"{pod.directory}/{EXIT_REPORT}"
    done = cluster.attempt("exec", pod.name, "-c", SIDECAR, "--", "cat", path, timeout_s=ASK_S)
    if done.code:
        raise SidecarError(f"{done.problem()} (there is none before the sidecar's first end)")
    try:
        return _json(scrubbed_answer(json.loads(done.stdout)))
    except ValueError:
        raise SidecarError(f"{path} is not JSON") from None


def _logs(pod: dict[str, Any], *, trainer_logs: bool) -> Iterator[tuple[str, bool]]:
    """Yield the containers whose logs are taken, and whether it is that of the life before."""
    status = pod.get("status") or {}
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        name = str(container["name"])
        if name not in (SIDECAR, HOOK) and not trainer_logs:
            continue
        if set(container.get("state") or {}) & {"running", "terminated"}:
            yield name, False
        if container.get("restartCount"):
            yield name, True


def _log(cluster: Kubectl, pod: str, container: str, *, previous: bool) -> str:
    options = ["--previous"] if previous else []
    command = ("logs", pod, "-c", container, "--timestamps", f"--tail={LOG_LINES}", *options)
    return scrubbed_text(cluster.end_of(*command, most_bytes=LOG_BYTES))


def _events(cluster: Kubectl, names: set[str]) -> str:
    """Return the events of the job, its pods, and what is between them, oldest first."""
    lines = []
    for event in cluster.get("events")["items"]:
        about = event.get("involvedObject") or {}
        name = str(about.get("name"))
        if name in names or any(each.startswith(f"{name}-") or name.startswith(f"{each}-") for each in names):
            at = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
            said = f"{event.get('type')} {event.get('reason')} {about.get('kind')}/{name}: {event.get('message')}"
            lines.append(f"{at} {said} (x{event.get('count') or 1})")
    return scrubbed_text("".join(f"{line}\n" for line in sorted(lines)))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
