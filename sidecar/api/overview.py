"""What the live page shows, as one bounded document."""

from __future__ import annotations

import time
from collections import OrderedDict

from sidecar import __version__
from sidecar.api import models, views
from sidecar.api.safety import safety_now
from sidecar.api.store_history import StoreHistory
from sidecar.catalog.catalog import Tracked
from sidecar.core.commit.resume import newest_first
from sidecar.core.commit.summary import StoredState
from sidecar.daemon.services import Services
from sidecar.download.request import ResumeState, ResumeStatus
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import rfc3339, step_of
from trainer_hook.contract.plain_text import plain_text

MOST_CHECKPOINTS = 60
MOST_LISTED = 12
"""Maximum length of every other list."""
MIB = 1 << 20


class OverviewService:
    """Builds the overview of the running services. Remembers the checkpoints that became durable and left the volume."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.earlier = StoreHistory(services)
        self._left_volume: OrderedDict[str, models.Checkpoint] = OrderedDict()
        services.catalog.observe(self._became_durable)
        services.events.observe(self._happened)

    def _became_durable(self, tracked: Tracked) -> None:
        """Remember a durable checkpoint: retention may delete it from the volume soon."""
        self._left_volume[tracked.name] = views.local_checkpoint(tracked).model_copy(update={"on_volume": False})
        self._left_volume.move_to_end(tracked.name)
        while len(self._left_volume) > MOST_CHECKPOINTS:
            self._left_volume.popitem(last=False)

    def _happened(self, name: str, fields: dict[str, object]) -> None:
        """Forget a checkpoint that retention deleted from the store."""
        if name == "store_checkpoint_deleted":
            self._left_volume.pop(str(fields.get("checkpoint")), None)

    def overview(self) -> models.Overview:
        """Return the overview now."""
        services = self._services
        settings, node = services.settings, services.settings.node
        checkpoints = self._checkpoints()
        durable = self._durable(checkpoints)
        risk, volume = views.at_risk(services), _rounded(views.volume(services))
        trainer, lease = views.trainer(services), views.lease(services)
        save = services.save_requests.latest
        return models.Overview(
            at=rfc3339(time.time()),
            version=__version__,
            job=settings.job,
            pod=settings.pod,
            node_index=node.index if node else None,
            node_count=node.count if node else None,
            phase=services.state.phase.value,
            safety=safety_now(services, durable_step=durable.step if durable else None),
            durable=durable,
            at_risk=risk,
            grace_seconds=settings.grace_seconds,
            termination=views.termination(services),
            flush=(views.flush_plan(services) or [])[:MOST_LISTED],
            trainer=trainer,
            store=views.store(services),
            degraded_reason=services.health.trouble and plain_text(services.health.trouble),
            lease=lease,
            checkpoints=checkpoints,
            earlier=self.earlier.status(),
            transfers=_transfers(services.executor),
            volume=volume,
            resume=_resume(services.resume_service.status()),
            save=views.saving(services, save) if save else None,
            token_required=settings.api_token == "required",  # noqa: S105 - a mode, not a token
        )

    def _checkpoints(self) -> list[models.Checkpoint]:
        """Return the newest checkpoints of store and volume, newest first."""
        stored = {checkpoint.name: checkpoint for checkpoint in self.earlier.newest()} | self._left_volume
        local = {tracked.name: tracked for tracked in self._services.catalog.all()}
        shown = []
        for name in newest_first([*stored, *local], and_final=True)[:MOST_CHECKPOINTS]:
            if name not in local:
                shown.append(stored[name])
                continue
            checkpoint = views.local_checkpoint(local[name])
            shown.append(checkpoint.model_copy(update={"in_store": checkpoint.in_store or name in stored}))
        bad = self._services.quarantine.quarantined
        return [views.judged(checkpoint, bad) for checkpoint in shown]

    def _durable(self, checkpoints: list[models.Checkpoint]) -> models.Durable | None:
        """Return the newest durable step: this process's, else the newest one of the store."""
        newest = self._services.catalog.newest_durable
        if newest is not None:
            own = views.local_checkpoint(newest)
            is_ours = newest.checkpoint is None or newest.checkpoint.restored_from is None
            return _durable(own, by_this_pod=is_ours)
        whole = [c for c in checkpoints if c.in_store and c.state != StoredState.BAD.value]
        stored = [c for c in whole if c.step is not None and step_of(c.name) is not None]
        return _durable(stored[0], by_this_pod=False) if stored else None


def _durable(checkpoint: models.Checkpoint, *, by_this_pod: bool) -> models.Durable:
    return models.Durable(
        name=checkpoint.name,
        step=checkpoint.step,
        created_at=checkpoint.created_at,
        committed_at=checkpoint.committed_at,
        by_this_pod=by_this_pod,
    )


def _transfers(executor: StoreExecutor) -> models.Transfers:
    return models.Transfers(
        throughput_bytes_per_s=executor.sent.telling_bytes_per_s(),
        limit_bytes_per_s=executor.gate.bytes_per_s,
        sent_bytes=executor.sent_bytes,
        retries=executor.retries,
        concurrency=executor.adapted.limit,
    )


def _rounded(volume: models.Volume) -> models.Volume:
    """Return the volume's space in whole MiB: it changes with every write, and nobody reads its last digits."""
    free = volume.free_bytes
    return volume if free is None else volume.model_copy(update={"free_bytes": free // MIB * MIB})


def _resume(status: ResumeStatus | None) -> models.Resume | None:
    if status is None or status.state is ResumeState.IDLE:
        return None
    shown = views.resume(status)
    return shown.model_copy(update={"meta": {}, "share": None, "passed_over": shown.passed_over[:MOST_LISTED]})
