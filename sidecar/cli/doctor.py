"""``doctor``: store, volume and grace period, examined before a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sidecar.cli import progress
from sidecar.cli.estimate import Size, parsed, parsed_bytes, positive_s
from sidecar.cli.options import Json, store_address
from sidecar.cli.output import print_answer, what_failed
from sidecar.cli.render import counted, table
from sidecar.core.format.durations import duration_s
from sidecar.core.planning.findings import Finding, exit_code_of, failure
from sidecar.core.planning.grace_diagnosis import grace_findings
from sidecar.core.planning.store_diagnosis import StoreFacts, store_findings
from sidecar.core.planning.volume_diagnosis import SpaceNeeds, volume_findings
from sidecar.errors import ConfigurationError
from trainer_hook.contract.plain_text import plain_text

if TYPE_CHECKING:
    from sidecar.daemon.settings import Settings
    from sidecar.standalone.session import StoreSession


@dataclass(frozen=True, slots=True)
class _Run:
    """The run that is planned. ``None``: not given."""

    checkpoint_bytes: int | None
    save_s: float | None
    grace_s: float | None


def doctor(
    store: Annotated[
        str | None, typer.Argument(metavar="STORE", help="s3://bucket/prefix or file:///path; else CKPT_STORE")
    ] = None,
    volume: Annotated[
        Path | None, typer.Option("--volume", metavar="DIR", help="the shared volume; else CKPT_DIR if set")
    ] = None,
    size: Size = None,
    save: Annotated[str | None, typer.Option(metavar="DURATION", help="that the trainer writes it, such as 12s")] = None,
    grace: Annotated[str | None, typer.Option(metavar="DURATION", help="of the pod; else CKPT_GRACE_SECONDS")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="warnings end with exit code 2, too")] = False,
    as_json: Json = False,
) -> int:
    """Examine store, volume and grace period before a run.

    Leaves nothing behind. Exit code 0: no failures.
    """
    planned = _Run(
        None if size is None else parsed_bytes("--size", size),
        None if save is None else parsed("--save", save, duration_s),
        None if grace is None else parsed("--grace", grace, positive_s),
    )
    environ = dict(os.environ)
    if store is not None:
        environ["CKPT_STORE"] = store_address(store).store
    if volume is not None:
        environ["CKPT_DIR"] = str(volume.absolute())
    facts, findings = _examined(environ, planned, has_volume=bool(environ.get("CKPT_DIR", "").strip()))
    code = exit_code_of(findings, strict=strict)
    answer = {
        "store": facts.url if facts else None,
        "measured": _measured(facts),
        "findings": [{name: value for name, value in asdict(f).items() if name != "exit_code"} for f in findings],
        "exit_code": code,
    }
    print_answer(answer, _text, as_json=as_json)
    return code


def _examined(environ: dict[str, str], planned: _Run, *, has_volume: bool) -> tuple[StoreFacts | None, list[Finding]]:
    from sidecar.cli.session import run_in_store
    from sidecar.daemon.settings import from_environment
    from sidecar.store.opening import place_of

    if not environ.get("CKPT_STORE", "").strip():
        raise ConfigurationError("no store: name it, such as s3://bucket/runs/llama, or set CKPT_STORE")
    try:
        settings = from_environment(environ, hostname=socket.gethostname())
        if has_volume:
            place_of(settings)  # The sidecar refuses a folder on the shared volume.
        facts = run_in_store("doctor", settings.store, _store_facts)
    except ConfigurationError as error:
        return None, [failure("settings", str(error), "correct it, then run doctor again")]
    findings = [replace(found, text=what_failed(found.text)) for found in store_findings(facts)]
    if has_volume:
        findings += _of_volume(settings, planned)
    findings += grace_findings(
        grace_s=planned.grace_s or settings.grace_seconds,
        up_bytes_per_s=facts.up_bytes_per_s,
        checkpoint_bytes=planned.checkpoint_bytes,
        save_s=planned.save_s,
    )
    return facts, findings


async def _store_facts(session: StoreSession, on_progress: progress.OnProgress) -> StoreFacts:
    from sidecar.standalone.store_examination import StoreExamination

    on_progress("examining the store", 0, 0)
    with _ended_by_sigterm():
        facts = await StoreExamination(session).run()
    on_progress("", 0, 0)
    return facts


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Cancel the present task at SIGTERM, so that it deletes what it wrote. A pod that is deleted gets that, not SIGINT."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    is_set = False
    with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        is_set = True
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if is_set:
            loop.remove_signal_handler(signal.SIGTERM)


def _of_volume(settings: Settings, planned: _Run) -> Iterator[Finding]:
    from sidecar.volume.examination import examine_volume

    needs = SpaceNeeds(planned.checkpoint_bytes, settings.local_copies, settings.min_free)
    return volume_findings(examine_volume(settings.dir, state=settings.state_dir), needs)


def _measured(facts: StoreFacts | None) -> dict[str, Any]:
    names = ("round_trip_s", "up_bytes_per_s", "down_bytes_per_s", "skew_s", "verification", "conditional_put")
    return {name: getattr(facts, name) for name in names} if facts else {}


def _text(answer: dict[str, Any]) -> str:
    found = answer["findings"]
    rows = [[f["severity"], f["check"], plain_text(f["text"])] for f in found]
    lines = [table(["", "CHECK", "FINDING"], rows)]
    steps = [f"{f['check']}: {plain_text(f['next_step'])}" for f in found if f["next_step"]]
    if steps:
        lines += ["", "next steps:", *(f"  {step}" for step in steps)]
    failures, warnings = (sum(f["severity"] == severity for f in found) for severity in ("failure", "warning"))
    return "\n".join([*lines, "", f"{counted(failures, 'failure')}, {counted(warnings, 'warning')}"])
