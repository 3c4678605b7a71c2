"""Turns the running parts into what the API says of them."""

from __future__ import annotations

from dataclasses import asdict

from sidecar import __version__
from sidecar.api import models
from sidecar.catalog import Tracked
from sidecar.core.manifest import Commit
from sidecar.core.order import upload_order
from sidecar.core.states import REPORTED, State
from sidecar.resume.resuming import ResumeStatus
from sidecar.runtime import Runtime
from sidecar.saves import Save
from trainer_hook.contract import rfc3339


def status(runtime: Runtime) -> models.Status:
    """Return everything at one glance."""
    newest = runtime.newest()
    return models.Status(
        version=__version__,
        phase=runtime.phase.value,
        degraded=runtime.health.trouble is not None,
        degraded_reason=runtime.health.trouble,
        store=_store(runtime),
        trainer=_trainer(runtime),
        termination=termination(runtime),
        newest_durable_step=runtime.catalog.newest_durable_step,
        newest_finished_step=newest.checkpoint.step if newest and newest.checkpoint else None,
        queue=queue(runtime),
        flush=flush_plan(runtime),
        given_up={t.name: t.reason or "" for t in runtime.catalog.all() if t.state in REPORTED},
        at_risk=models.AtRisk(**asdict(runtime.risk())),
        bandwidth_limit_bytes_per_s=runtime.transfers.gate.bytes_per_s,
        concurrency=runtime.transfers.adapted.limit,
        throughput_bytes_per_s=runtime.transfers.sent.bytes_per_s(),
        sent_bytes=runtime.transfers.sent_bytes,
        retries=runtime.transfers.retries,
        volume=volume(runtime),
        rejected={t.name: t.reason or "" for t in runtime.catalog.all() if t.state is State.REJECTED},
        quarantined=runtime.resuming.quarantined,
    )


def volume(runtime: Runtime) -> models.Volume:
    """Return the space on the volume, as far as it can be read."""
    try:
        return models.Volume(free_bytes=runtime.volume.free_bytes(), total_bytes=runtime.volume.total_bytes())
    except OSError:
        return models.Volume(free_bytes=None, total_bytes=None)


def queue(runtime: Runtime) -> list[models.Transfer]:
    """Return what is not durable yet, next first."""
    pending = {t.name: t for t in runtime.catalog.pending()}
    names = [w.name for w in upload_order(t.waiting for t in pending.values())]
    if runtime.plan is not None:
        rank = runtime.plan.rank()
        names.sort(key=lambda name: rank.get(name, -1))  # what is all sent is not planned any more
    return [_transfer(pending[name]) for name in names]


def flush_plan(runtime: Runtime) -> list[models.Planned] | None:
    """Return what is sent in the time that is left, while the pod is going."""
    if runtime.plan is None:
        return None
    return [
        models.Planned(
            checkpoint=planned.name,
            verdict=planned.verdict.value,
            left_bytes=planned.left_bytes,
            predicted_s=None if planned.done_in_s is None else round(planned.done_in_s, 3),
            reason=planned.reason,
        )
        for planned in runtime.plan.order
    ]


def saving(runtime: Runtime, save: Save) -> models.Saving:
    """Return how far a save on request is."""
    tracked = runtime.catalog.get(save.checkpoint) if save.checkpoint else None
    return models.Saving(
        id=save.id,
        action=save.action,
        state=save.state,
        checkpoint=save.checkpoint,
        detail=save.detail,
        sent_bytes=tracked.sent_bytes if tracked else None,
        size_bytes=tracked.checkpoint.size_bytes if tracked and tracked.checkpoint else None,
    )


def termination(runtime: Runtime) -> models.Termination | None:
    """Return since when the pod is known to be going, if it is."""
    going, left_s = runtime.termination.going, runtime.termination.left_s()
    if going is None or left_s is None:
        return None
    grace_s = runtime.settings.grace_seconds
    return models.Termination(
        source=going.source, at=rfc3339(going.at_s), grace_seconds=grace_s, deadline_in_s=round(left_s, 3)
    )


def local_checkpoint(tracked: Tracked) -> models.Checkpoint:
    """Return one checkpoint of the volume."""
    checkpoint = tracked.checkpoint
    shown = models.Checkpoint(
        name=tracked.name,
        state=tracked.state.value,
        reason=tracked.reason,
        sent_bytes=tracked.sent_bytes,
        on_volume=True,
        in_store=tracked.state is State.COMMITTED,
        committed_at=rfc3339(tracked.committed_at_s) if tracked.committed_at_s else None,
    )
    if checkpoint is None:
        return shown
    return shown.model_copy(
        update={
            "step": checkpoint.step,
            "save_reason": checkpoint.reason,
            "attempt": checkpoint.attempt,
            "node_index": checkpoint.node.index,
            "node_count": checkpoint.node.count,
            "created_at": rfc3339(checkpoint.created_at_s),
            "files": len(checkpoint.files),
            "size_bytes": checkpoint.size_bytes,
        }
    )


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
    """Return how far a resume is."""
    return models.Resume.model_validate(asdict(status))


def _store(runtime: Runtime) -> models.StoreStatus:
    can = runtime.capabilities
    return models.StoreStatus(
        url=runtime.store_url,
        reached=can is not None,
        verification=can.verification.value if can else None,
        conditional_put=can.conditional_put if can else None,
    )


def _trainer(runtime: Runtime) -> models.Trainer:
    held, said = runtime.volume.held_leases(), runtime.termination.trainer()
    return models.Trainer(
        alive=held > 0,
        ranks=held,
        state=said.state if said else None,
        step=said.step if said else None,
        updated_at=said.updated_at if said else None,
    )


def _transfer(tracked: Tracked) -> models.Transfer:
    size_bytes = tracked.checkpoint.size_bytes if tracked.checkpoint else 0
    return models.Transfer(
        checkpoint=tracked.name,
        state=tracked.state.value,
        sent_bytes=tracked.sent_bytes,
        size_bytes=size_bytes,
        reason=tracked.reason,
    )
