"""Conversion of the running services' state into API models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sidecar import __version__
from sidecar.api import models
from sidecar.catalog.catalog import Tracked
from sidecar.core.commit.summary import StoredState
from sidecar.core.format.manifest import Commit
from sidecar.core.lifecycle.states import REPORTED, State
from sidecar.core.schedule.order import upload_order
from sidecar.daemon.services import Services
from sidecar.download.request import ResumeStatus
from sidecar.lifecycle.save_requests import SaveRequest
from trainer_hook.contract import rfc3339
from trainer_hook.contract.plain_text import plain_text


def status(services: Services, safety: models.Safety) -> models.Status:
    """Return the status of the sidecar."""
    newest, node = services.catalog.newest_finished(), services.settings.node
    return models.Status(
        version=__version__,
        phase=services.state.phase.value,
        safety=safety,
        node_index=node.index if node else None,
        node_count=node.count if node else None,
        degraded=services.health.trouble is not None,
        degraded_reason=services.health.trouble,
        store=store(services),
        trainer=trainer(services),
        termination=termination(services),
        lease=lease(services),
        newest_durable_step=services.catalog.newest_durable_step,
        newest_finished_step=newest.checkpoint.step if newest and newest.checkpoint else None,
        queue=queue(services),
        flush=flush_plan(services),
        given_up={t.name: t.reason or "" for t in services.catalog.all() if t.state in REPORTED},
        at_risk=at_risk(services),
        bandwidth_limit_bytes_per_s=services.executor.gate.bytes_per_s,
        concurrency=services.executor.adapted.limit,
        throughput_bytes_per_s=services.executor.sent.telling_bytes_per_s(),
        sent_bytes=services.executor.sent_bytes,
        retries=services.executor.retries,
        volume=volume(services),
        rejected={t.name: t.reason or "" for t in services.catalog.all() if t.state is State.REJECTED},
        bad=services.quarantine.quarantined,
    )


def at_risk(services: Services) -> models.AtRisk:
    """Return what a kill would cost now."""
    return models.AtRisk(**asdict(services.risk_monitor.risk()), grows=services.risk_monitor.grows)


def lease(services: Services) -> models.Lease:
    """Return this pod's share of the lease."""
    lease, waits_for = services.lease, services.holder_watch.waits_for
    if lease.fenced.is_set():
        return models.Lease(state="fenced", reason=lease.fenced_by)
    if waits_for is not None:
        return models.Lease(state="waiting", reason=waits_for)
    return models.Lease(state="held" if lease.is_held else "none")


def volume(services: Services) -> models.Volume:
    """Return the space on the volume; fields that cannot be read are ``None``."""
    try:
        return models.Volume(free_bytes=services.volume.free_bytes(), total_bytes=services.volume.total_bytes())
    except OSError:
        return models.Volume(free_bytes=None, total_bytes=None)


def queue(services: Services) -> list[models.Transfer]:
    """Return the checkpoints that are not durable yet, in upload order."""
    pending = {t.name: t for t in services.catalog.pending()}
    names = [w.name for w in upload_order(t.waiting for t in pending.values())]
    if services.flush.plan is not None:
        rank = services.flush.plan.rank()
        names.sort(key=lambda name: rank.get(name, -1))  # checkpoints whose bytes are all sent are not in the plan
    return [_transfer(pending[name]) for name in names]


def flush_plan(services: Services) -> list[models.Planned] | None:
    """Return the flush plan; ``None`` without a termination notice."""
    if services.flush.plan is None:
        return None
    return [
        models.Planned(
            checkpoint=planned.name,
            verdict=planned.verdict.value,
            left_bytes=planned.left_bytes,
            predicted_s=None if planned.done_in_s is None else round(planned.done_in_s, 3),
            reason=planned.reason,
        )
        for planned in services.flush.plan.order
    ]


def saving(services: Services, save: SaveRequest) -> models.Saving:
    """Return the progress of a save on request."""
    tracked = services.catalog.get(save.checkpoint) if save.checkpoint else None
    return models.Saving(
        id=save.id,
        action=save.action,
        state=save.state,
        checkpoint=save.checkpoint,
        detail=save.detail,
        sent_bytes=tracked.sent_bytes if tracked else None,
        size_bytes=tracked.checkpoint.size_bytes if tracked and tracked.checkpoint else None,
    )


def termination(services: Services) -> models.Termination | None:
    """Return the termination notice, or ``None``."""
    notice, left_s = services.termination.current_notice, services.termination.deadline.left_s()
    if notice is None or left_s is None:
        return None
    grace_s = services.settings.grace_seconds
    return models.Termination(
        source=notice.source, at=rfc3339(notice.at_s), grace_seconds=grace_s, deadline_in_s=round(left_s, 3)
    )


def local_checkpoint(tracked: Tracked) -> models.Checkpoint:
    """Return one checkpoint of the volume."""
    checkpoint = tracked.checkpoint
    known: dict[str, Any] = {}
    if checkpoint is not None:
        known = {
            "step": checkpoint.step,
            "save_reason": checkpoint.reason,
            "attempt": checkpoint.attempt,
            "node_index": checkpoint.node.index,
            "node_count": checkpoint.node.count,
            "created_at": rfc3339(checkpoint.created_at_s),
            "files": len(checkpoint.files),
            "size_bytes": checkpoint.size_bytes,
        }
    return models.Checkpoint(
        name=tracked.name,
        state=tracked.state.value,
        reason=tracked.reason,
        sent_bytes=tracked.sent_bytes,
        on_volume=True,
        in_store=tracked.state is State.COMMITTED,
        committed_at=rfc3339(tracked.committed_at_s) if tracked.committed_at_s else None,
        **known,
    )


def judged(checkpoint: models.Checkpoint, bad: Mapping[str, str]) -> models.Checkpoint:
    """Return a checkpoint as bad if it is durable and among those that failed verification. ``bad``: reasons, by name."""
    if checkpoint.state != State.COMMITTED or checkpoint.name not in bad:
        return checkpoint
    return checkpoint.model_copy(update={"state": StoredState.BAD.value, "reason": bad[checkpoint.name]})


def stored_checkpoint(commit: Commit) -> models.Checkpoint:
    """Return one committed checkpoint of the store."""
    return models.Checkpoint(
        name=commit.name,
        step=commit.step,
        state=State.COMMITTED.value,
        save_reason=commit.reason,
        attempt=commit.attempt,
        node_count=len(commit.manifests),
        created_at=commit.created_at,
        committed_at=commit.committed_at,
        files=commit.files,
        size_bytes=commit.size_bytes,
        on_volume=False,
        in_store=True,
    )


def resume(status: ResumeStatus) -> models.Resume:
    """Return the progress of a resume."""
    return models.Resume.model_validate(asdict(status))


def store(services: Services) -> models.StoreStatus:
    """Return the store's address and capabilities."""
    can = services.state.capabilities
    return models.StoreStatus(
        url=services.store.url,
        reached=can is not None,
        verification=can.verification.value if can else None,
        conditional_put=can.conditional_put if can else None,
    )


def trainer(services: Services) -> models.Trainer:
    """Return the state of the trainer."""
    held, trainer = services.volume.held_leases(), services.pod.trainer()
    told = {} if trainer is None else asdict(trainer)
    if trainer is not None and trainer.save_error is not None:
        told["save_error"] = plain_text(trainer.save_error)
    return models.Trainer.model_validate({"alive": held > 0, "ranks": held, **told})


def _transfer(tracked: Tracked) -> models.Transfer:
    return models.Transfer(
        checkpoint=tracked.name,
        state=tracked.state.value,
        sent_bytes=tracked.sent_bytes,
        size_bytes=tracked.size_bytes,
        reason=tracked.reason,
    )
