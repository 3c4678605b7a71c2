"""Exit report: durable and lost checkpoints with reasons, as a file, as the termination message and as one log line."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.lifecycle.exit_codes import EXIT_DONE, EXIT_FENCED, EXIT_GIVEN_UP
from sidecar.core.lifecycle.fencing import TWO_AT_ONCE_HINT
from sidecar.core.lifecycle.phases import REPORT_S
from sidecar.core.lifecycle.states import PENDING, REPORTED, State
from sidecar.core.lifecycle.termination_sentence import ALL_DURABLE, durable_step_text
from sidecar.daemon import termination_message
from sidecar.lifecycle.pod import LAST_REPORT
from sidecar.lifecycle.termination import Termination
from sidecar.thread_pool import ThreadPool
from sidecar.volume.volume import Volume
from trainer_hook.contract import EXIT_REPORT, rfc3339

log = structlog.get_logger()

MOST_NAMED = 8
NOTHING_SAVED = "no training process in this pod used the hook, and no checkpoint was written: nothing was saved"
_IF_ANY = ("newest_rejected", "unfinished", "unseen", "fenced")
_LOGGED = ("exit_code", "newest_durable_step", "durable", "given_up", *_IF_ANY, "grace_used_s")


def exit_report(
    catalog: Catalog,
    termination: Termination,
    *,
    bad: dict[str, str],
    unseen: str | None = None,
    unfinished: dict[str, str],
    had_hook: bool,
) -> dict[str, Any]:
    """Return the report as it is written to ``.ckpt/exit-report.json``.

    Args:
        catalog: All known checkpoints.
        termination: The termination notice, with its time.
        bad: Reasons of checkpoints in the store that failed verification, by name.
        unfinished: Reasons of checkpoints that the trainer did not finish, by name.
        had_hook: Whether a training process on this volume has used the hook.
        unseen: Why a finished checkpoint may be unknown; ``None``: all are known.
    """
    durable = sorted((t for t in catalog.all() if t.state is State.COMMITTED), key=lambda t: t.name)
    given_up = [t for t in catalog.all() if (t.state in PENDING or t.state in REPORTED) and not catalog.is_abandoned_part(t)]
    newest_rejected = {t.name: t.reason for t in catalog.newest_rejected()}
    notice = termination.current_notice
    exit_code = EXIT_GIVEN_UP if given_up or newest_rejected or unseen else EXIT_DONE
    return {
        "format": 1,
        "written_at": rfc3339(time.time()),
        "exit_code": EXIT_FENCED if termination.fenced_by else exit_code,
        "fenced": termination.fenced_by,
        "notice": None if notice is None else {"source": notice.source, "at": rfc3339(notice.at_s)},
        "grace_used_s": None if notice is None else round(time.monotonic() - notice.began_s, 3),
        "newest_durable_step": catalog.newest_durable_step,
        "durable": [t.name for t in durable],
        "given_up": [_given_up(t) for t in given_up],
        "newest_rejected": newest_rejected,
        "unseen": unseen,
        "unfinished": unfinished,
        "nothing_saved": not (had_hook or unfinished or unseen or catalog.all() or catalog.newest_durable),
        "rejected": {t.name: t.reason for t in catalog.all() if t.state is State.REJECTED},
        "bad": bad,
    }


def write(volume: Volume, report: dict[str, Any]) -> None:
    """Write the log line, the termination message and the file; the file last, because its volume may be full or hang."""
    level = log.info if report["exit_code"] == EXIT_DONE else log.error
    if report["nothing_saved"]:
        log.warning(
            "nothing_was_saved",
            reason=NOTHING_SAVED,
            hint="a loop of your own needs a few lines: trainer_hook.torch.Checkpointer, or trainer_hook.plain without torch",
        )
    level("exit_report", **{key: report[key] for key in _LOGGED if key not in _IF_ANY or report[key]})
    termination_message.write(_sentence(report))
    content = json.dumps(report, indent=1).encode() + b"\n"
    for place in [volume.state / LAST_REPORT, *([volume / EXIT_REPORT] if volume.has_own_state else [])]:
        try:
            place.publish(content)
        except OSError as error:
            log.warning("exit_report_not_written", path=str(place), error=error.strerror)


async def write_in_time(volume: Volume, report: dict[str, Any]) -> None:
    """Do as ``write``, for at most ``REPORT_S`` seconds: the volume may hang."""
    # An additional thread: all threads of the event loop may be blocked by a volume that hangs.
    loop, writer = asyncio.get_running_loop(), ThreadPool(1, "report")
    try:
        writing = loop.run_in_executor(writer, write, volume, report)
    except RuntimeError:  # at a limit of processes
        writing = loop.run_in_executor(None, write, volume, report)
    await asyncio.wait({writing}, timeout=REPORT_S)
    writer.shutdown(wait=False)


def ended_without_volume(volume: Volume, why: str) -> int:
    """Return the exit code of a process that ended before it could use the volume; write the termination message.

    Another sidecar, which may have ended by its deadline, or an error kept it from that: it is unknown whether the finished
    checkpoints on the volume are durable. The exit report on the volume belongs to another sidecar process.
    """
    try:
        finished = [name for name in volume.names() if volume.read_marker_version(name) is not None]
        if not finished:
            return EXIT_DONE
        unseen = f"{why}; on it are {', '.join(sorted(finished)[:MOST_NAMED])}"
    except OSError as error:
        unseen = f"{why}; it cannot be read: {error.strerror}"
    log.error("ended_without_the_volume", reason=unseen, hint="the next sidecar on this volume sends what is not durable")
    termination_message.write(f"not everything finished is known to be durable: {unseen}")
    return EXIT_GIVEN_UP


def _given_up(tracked: Tracked) -> dict[str, Any]:
    return {
        "checkpoint": tracked.name,
        "step": tracked.checkpoint.step if tracked.checkpoint else None,
        "reason": tracked.reason or "the sidecar ended before it was durable",
        "sent_bytes": tracked.sent_bytes,
        "size_bytes": tracked.size_bytes,
    }


def _sentence(report: dict[str, Any]) -> str:
    durable = durable_step_text(report["newest_durable_step"])
    if report["unfinished"]:
        durable += "; not finished: " + "; ".join(f"{name} ({why})" for name, why in report["unfinished"].items())
    lost = (
        [f"given up: {'; '.join(_why(e['checkpoint'], e['reason']) for e in report['given_up'])}"] if report["given_up"] else []
    )
    if report["newest_rejected"]:
        names = "; ".join(_why(name, reason) for name, reason in report["newest_rejected"].items())
        lost.append(f"rejected, so the newest is not in the store: {names}")
    if report["fenced"]:
        fenced = f"fenced: {report['fenced']}; this pod made nothing durable after that; {durable}"
        return f"{fenced}. Two pods at once on purpose? Then {TWO_AT_ONCE_HINT}"
    if lost:
        advice = ". Raise terminationGracePeriodSeconds and CKPT_GRACE_SECONDS, or save less" if report["given_up"] else ""
        return f"{'. '.join(lost)}. {durable}{advice}"
    if report["unseen"]:
        return f"not everything finished is known to be durable: {report['unseen']}; {durable}"
    return f"{ALL_DURABLE}; {durable}" + (f"; {NOTHING_SAVED}" if report["nothing_saved"] else "")


def _why(name: str, reason: str) -> str:
    return f"{name} ({reason})"
