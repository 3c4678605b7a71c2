"""What a store holds, as JSON and as text for a terminal. Names and reasons come from the store: nothing in them is trusted."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sidecar.cli.render import counted, field_lines, table, text_of
from sidecar.core.format.readable import size_text
from trainer_hook.contract.plain_text import plain_text

if TYPE_CHECKING:
    from sidecar.standalone.listing import ListedCheckpoint, ListedRun

_NANOSECONDS = re.compile(r"[0-9]{20}", re.ASCII)


def time_text(modified: str) -> str | None:
    """Return the time of a write by a store's clock in RFC 3339; ``None``: unknown."""
    if _NANOSECONDS.fullmatch(modified):  # of a file
        return datetime.fromtimestamp(int(modified) // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return modified or None


def checkpoint_fields(listed: ListedCheckpoint) -> dict[str, Any]:
    """Return a listed checkpoint as JSON shows it. Fields of its commit are there if that was read."""
    summary = listed.summary
    fields: dict[str, Any] = {
        "name": summary.name,
        "step": summary.step,
        "state": listed.state.value,
        "modified_at": time_text(summary.modified),
        "objects": summary.objects,
        "size_bytes": summary.size_bytes,
    }
    if listed.commit is None or listed.commit.commit is None:
        return fields
    commit = listed.commit.commit
    return fields | {
        "save_reason": commit.reason,
        "attempt": commit.attempt,
        "node_count": len(commit.manifests),
        "world_size": commit.world_size,
        "created_at": commit.created_at,
        "committed_at": commit.committed_at,
    }


def listing_text(answer: dict[str, Any]) -> str:
    """Return the checkpoints of a run."""
    rows = answer["checkpoints"]
    if not rows:
        return "no checkpoints"
    is_long = any("attempt" in row for row in rows)
    header = ["CHECKPOINT", "STATE", "WRITTEN", "FILES", "SIZE", *(["REASON", "NODES", "ATTEMPT"] if is_long else [])]
    return table(header, [_row(row, is_long=is_long) for row in rows])


def _row(fields: dict[str, Any], *, is_long: bool) -> list[str]:
    shown = [fields["name"], fields["state"], fields["modified_at"], fields["objects"], size_text(fields["size_bytes"])]
    if is_long:
        shown += [fields.get(name) for name in ("save_reason", "node_count", "attempt")]
    return [text_of(value) for value in shown]


def run_fields(run: ListedRun) -> dict[str, Any]:
    """Return a listed run as JSON shows it."""
    document = run.document
    return {
        "name": run.name,
        "is_run": run.is_run,
        "checkpoints": len(run.checkpoints),
        "newest": run.checkpoints[0] if run.checkpoints else None,
        "job": document.job if document else None,
        "run_id": document.run_id if document else None,
        "holder": document.holder if document else None,
    }


def runs_text(answer: dict[str, Any]) -> str:
    """Return the runs below a prefix."""
    header = ["RUN", "CHECKPOINTS", "NEWEST", "JOB", "LATEST POD"]
    rows = []
    for run in answer["runs"]:
        if run["is_run"]:
            named = (f"{run['name']}/", run["checkpoints"], run["newest"], run["job"], run["holder"])
            rows.append([text_of(value) for value in named])
    folders = [f"{answer['store']}/{run['name']}" for run in answer["runs"] if not run["is_run"]]
    lines = [table(header, rows)] if rows else []
    lines += [
        f"{plain_text(folder)} is no run; those below it: checkpoint-sidecar ls {plain_text(folder)}" for folder in folders
    ]
    return "\n".join(lines)


def details_text(answer: dict[str, Any]) -> str:
    """Return one checkpoint with its files."""
    shown = [(key, value) for key, value in answer.items() if key not in ("files", "problems")]
    lines = field_lines([*shown, *(("problem", problem["problem"]) for problem in answer["problems"])])
    if answer["files"]:
        rows = [[text_of(f["path"]), size_text(f["size_bytes"]), f["crc64nvme"], str(f["node"])] for f in answer["files"]]
        lines += ["", table(["FILE", "SIZE", "CRC64NVME", "NODE"], rows)]
    return "\n".join(lines)


def verification_text(answer: dict[str, Any]) -> str:
    """Return the outcome of a verification."""
    how = "documents and sizes" if answer["quick"] else "every byte"
    lines = []
    for checked in answer["checkpoints"]:
        name = plain_text(checked["checkpoint"])
        if not checked["problems"]:
            lines.append(f"{name}: verified, {how}: {counted(checked['files'], 'file')}, {size_text(checked['size_bytes'])}")
        lines += [f"{name}: {plain_text(problem['problem'])}" for problem in checked["problems"]]
        if checked["problems"] and all(problem["kind"] == "bad" for problem in checked["problems"]):
            release = "`checkpoint-sidecar bad release` lets a resume try it again"
            lines.append(f"{name}: nothing else is wrong now ({how}): {release}")
    return "\n".join(lines)


def plan_text(answer: dict[str, Any]) -> str:
    """Return a retention plan or its outcome."""
    verb = "delete" if answer["dry_run"] else "deleted"
    rows = [["keep", text_of(kept["checkpoint"]), text_of(kept["reason"])] for kept in answer["kept"]]
    rows += [[verb, text_of(gone["checkpoint"]), text_of(gone["reason"])] for gone in answer["deleted"]]
    return table(["PLAN" if answer["dry_run"] else "DONE", "CHECKPOINT", "WHY"], rows) if rows else "no committed checkpoints"


def bad_text(answer: dict[str, Any]) -> str:
    """Return the bad checkpoints of a prefix."""
    rows = []
    for q in answer["bad"]:
        applies = "yes" if q["applies"] else "no, of an earlier commit"
        rows.append([text_of(value) for value in (q["checkpoint"], applies, q["at"], q["reason"])])
    return table(["CHECKPOINT", "APPLIES", "SINCE", "WHY"], rows) if rows else "no bad checkpoints"
