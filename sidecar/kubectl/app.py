"""The commands of ``kubectl ckpt``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sidecar import __version__
from sidecar.cli.options import Json, TimeoutS
from sidecar.core.job.save import JobSave
from sidecar.core.job.workloads import why_not_suspended
from sidecar.core.lifecycle.exit_codes import EXIT_GIVEN_UP, EXIT_UNREACHABLE
from sidecar.errors import ConfigurationError, RequestRefused
from sidecar.kubectl import bundle as bundles
from sidecar.kubectl import job as jobs
from sidecar.kubectl import saving
from sidecar.kubectl.cluster import Kubectl

JobName = Annotated[str, typer.Argument(metavar="JOB", help="NAME or KIND/NAME, such as train, jobset/train, pod/train-0")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="namespace (default: that of the context)")]
Context = Annotated[str | None, typer.Option("--context", help="context of the kubeconfig file")]

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kubectl-ckpt {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Checkpoints of one job, across all of its pods."""


@app.command()
def status(job: JobName, namespace: Namespace = None, context: Context = None, as_json: Json = False) -> int:
    """Show whether the job is safe now.

    Its durable step, what is at risk, and each pod.
    """
    from sidecar.kubectl.render import show_status

    cluster = Kubectl(namespace, context)
    found = jobs.find(cluster, job)
    answer = jobs.status_of(cluster, found)
    if as_json:
        print(json.dumps({"job": found.name, "kind": found.kind.kind} | asdict(answer)))
    else:
        show_status(found.title, answer)
    return 0 if answer.pods_answering else EXIT_UNREACHABLE


@app.command()
def save(
    job: JobName, timeout_s: TimeoutS = 600.0, namespace: Namespace = None, context: Context = None, as_json: Json = False
) -> int:
    """Make every node save now, and wait until that is durable.

    Exit code 3: it is not in time.
    """
    cluster = Kubectl(namespace, context)
    found = jobs.find(cluster, job)
    saved = saving.save(cluster, found, timeout_s=timeout_s)
    _print_save(saved, {}, as_json=as_json)
    return 0 if saved.is_durable else EXIT_GIVEN_UP


@app.command()
def pause(
    job: JobName, timeout_s: TimeoutS = 600.0, namespace: Namespace = None, context: Context = None, as_json: Json = False
) -> int:
    """Save, wait until that is durable, then suspend the job.

    It waits for the end of the pods.
    """
    cluster = Kubectl(namespace, context)
    found = jobs.find(cluster, job)
    top = jobs.outermost(cluster, found)
    why = why_not_suspended(top.kind, top.workload)
    if why is not None:
        raise RequestRefused(why)
    saved = saving.save(cluster, found, timeout_s=timeout_s)
    if not saved.is_durable:
        _print_save(saved, {"suspended": False}, as_json=as_json)
        saving.say(f"{top.title} is not suspended, because the save is not durable")
        return EXIT_GIVEN_UP
    saving.suspend(cluster, top)
    saving.say(f"{top.title} is suspended; its pods save once more as they end")
    left = jobs.wait_until_gone(cluster, found, timeout_s=timeout_s)
    command = saving.continue_command(cluster, top)
    fields = {"suspended": True, "workload": top.title, "pods_left": left, "continue_with": command}
    _print_save(saved, fields, as_json=as_json)
    if left:
        saving.say(f"still there: {', '.join(left)}")
    return EXIT_GIVEN_UP if left else 0


def _print_save(saved: JobSave, more: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        fields = {"state": saved.state, "checkpoint": saved.checkpoint, "problems": dict(saved.problems)}
        print(json.dumps(fields | more))
        return
    if saved.is_durable:
        print(f"{saved.checkpoint} is durable on every node")
    if "continue_with" in more:
        print(f"{more['workload']} is suspended. To go on:\n  {more['continue_with']}")


@app.command()
def bundle(
    job: JobName,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the archive (default: ckpt-JOB-TIME.tar.gz)")] = None,
    trainer_logs: Annotated[
        bool, typer.Option("--trainer-logs", help="also the logs of the other containers, in which a script may print anything")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    as_json: Json = False,
) -> int:
    """Collect what a later look at the job needs, without secrets.

    One archive with status, reports, logs, events and settings.
    """
    cluster = Kubectl(namespace, context)
    found = jobs.find(cluster, job)
    path = output or Path(time.strftime(f"ckpt-{found.name}-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    try:
        names = bundles.write_bundle(cluster, found, path, trainer_logs=trainer_logs)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}: write it elsewhere with --output") from None
    print(json.dumps({"bundle": str(path), "files": names}) if as_json else path)
    if not as_json:
        print(f"{len(names)} files; look through them before you pass them on", file=sys.stderr)
    return 0
