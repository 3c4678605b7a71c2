"""Whether training is safe now: one answer, which page, status, overview and metrics show."""

from __future__ import annotations

from sidecar.api import models, views
from sidecar.catalog.catalog import Tracked
from sidecar.core.lifecycle.safety import Facts, cost_of_kill, cost_of_sigterm, safety
from sidecar.core.lifecycle.states import REPORTED
from sidecar.core.schedule.flush import Outcome
from sidecar.daemon.services import Services
from sidecar.download.request import ResumeState
from trainer_hook.contract import step_of

MOST_REASONS = 12


def safety_now(services: Services, *, durable_step: int | None) -> models.Safety:
    """Return the answer. ``durable_step``: the newest durable step that is known, also of earlier pods."""
    facts = _facts(services, durable_step)
    answer, kill, sigterm = safety(facts), cost_of_kill(facts), cost_of_sigterm(facts)
    return models.Safety(
        level=answer.level.value,
        headline=answer.headline,
        reasons=list(answer.reasons[:MOST_REASONS]),
        kill=models.Cost(lost=kill.lost, why=kill.why),
        sigterm=models.Cost(lost=sigterm.lost, why=sigterm.why),
    )


def _facts(services: Services, durable_step: int | None) -> Facts:
    resume, monitor = services.resume_service.status(), services.risk_monitor
    risk, trainer, lease, volume = monitor.risk(), views.trainer(services), views.lease(services), views.volume(services)
    evidence = services.executor.evidence()
    return Facts(
        phase=services.state.phase,
        trains=monitor.grows,
        sees_trainer=trainer.alive or trainer.state is not None,
        has_begun=monitor.has_begun,
        durable_step=durable_step,
        steps_at_risk=risk.steps_at_risk,
        seconds_at_risk=risk.seconds_at_risk,
        fits_grace=risk.fits_grace,
        predicted_durable_s=risk.predicted_durable_s,
        grace_s=services.settings.grace_seconds,
        store=risk.store,
        store_quiet_s=evidence.answered_ago_s,
        still_s=evidence.still_ago_s,
        pending=len(services.catalog.pending()),
        late=_late(services),
        given_up=sum(t.state in REPORTED and _is_newest(services, t) for t in services.catalog.all()),
        rejected=len(services.catalog.newest_rejected()),
        quarantined=len(services.quarantine.quarantined),
        fails_again=services.health.trouble is not None,
        lease=lease.reason,
        is_fenced=services.lease.fenced.is_set(),
        is_resuming=resume is not None and resume.state in (ResumeState.CHOOSING, ResumeState.DOWNLOADING),
        free_bytes=volume.free_bytes,
        volume_bytes=volume.total_bytes,
        checkpoint_bytes=monitor.checkpoint_bytes,
    )


def _late(services: Services) -> int:
    """Return the number of planned uploads without time that no newer one in time makes up for."""
    plan, catalog = services.flush.plan, services.catalog
    if plan is None:
        return 0
    steps = {planned.name: _step(catalog.get(planned.name)) for planned in plan.order}
    in_time = [steps[p.name] for p in plan.order if p.verdict is not Outcome.NO_TIME]
    newest = max([*in_time, catalog.newest_durable_step or -1], default=-1)
    return sum(p.verdict is Outcome.NO_TIME and steps[p.name] > newest for p in plan.order)


def _is_newest(services: Services, tracked: Tracked) -> bool:
    durable_step = services.catalog.newest_durable_step
    return durable_step is None or _step(tracked) > durable_step


def _step(tracked: Tracked | None) -> float:
    """Return the step; infinite for ``final`` and for a checkpoint that is still being written."""
    step = step_of(tracked.name) if tracked else None
    return float("inf") if step is None else step
