"""Answers for a terminal."""

from __future__ import annotations

from sidecar.cli.render import table, text_of
from sidecar.core.format.readable import seconds_text, size_text
from sidecar.core.job.status import JobStatus, PodReport
from sidecar.core.lifecycle.safety import Level
from trainer_hook.contract.plain_text import plain_text

_STYLES = {Level.SAFE: "green", Level.UNKNOWN: "default", Level.ATTENTION: "yellow", Level.DANGER: "bold red"}


def show_status(title: str, status: JobStatus) -> None:
    """Print the status of a job: in colour on a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{status.level.upper()}  ", _STYLES[status.level]), plain_text(status.headline)))
    for reason in status.reasons:
        console.print(Text(f"  also: {plain_text(reason)}"))
    console.print(Text("\n".join(["", *_facts(title, status), "", *([_table(status)] if status.pods else [])])))


def _facts(title: str, status: JobStatus) -> list[str]:
    risk = f"at risk: {text_of(status.steps_at_risk)} steps, {seconds_text(status.seconds_at_risk)} of training"
    lines = [
        f"job        {plain_text(title)}, {status.pods_answering} of {status.pods_wanted} sidecars answer",
        f"trainer    step {text_of(status.trained_step)}",
        f"durable    step {text_of(status.durable_step)}, {risk}",
        f"SIGTERM    {plain_text(status.sigterm) if status.sigterm else '–'}",
    ]
    if status.pending_bytes:
        lines.append(f"uploading  {size_text(status.sent_bytes)} of {size_text(status.pending_bytes)}")
    return lines


def _table(status: JobStatus) -> str:
    return table(["POD", "SIDECAR", "PHASE", "STEP", "FINISHED", "DURABLE", "SAFE"], [_row(pod) for pod in status.pods])


def _row(pod: PodReport) -> list[str]:
    numbers = [text_of(value) for value in (pod.phase, pod.trained_step, pod.finished_step, pod.durable_step)]
    return [plain_text(pod.pod), pod.state, *numbers, plain_text(pod.headline or pod.detail or "–")]
