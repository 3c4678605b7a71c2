"""Time at risk of the running training, and the warning when a just-in-time save does not fit the grace period."""

from __future__ import annotations

import time
from typing import Any

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events, rounded
from sidecar.core.lifecycle.risk import Risk, fits_now, risk
from sidecar.core.lifecycle.save_profile import SaveProfile, usual_profile
from sidecar.core.lifecycle.store_state import store_state
from sidecar.core.lifecycle.trained_time import TrainedTime
from sidecar.core.schedule.throughput import TELLING_BYTES
from sidecar.lifecycle.pod import Pod
from sidecar.transfer.executor import StoreExecutor
from sidecar.volume.volume import Volume


class RiskMonitor:
    """Computes the risk from the catalog, the trainer's step and the measured throughput."""

    def __init__(
        self, volume: Volume, catalog: Catalog, events: Events, executor: StoreExecutor, pod: Pod, *, grace_s: float
    ) -> None:
        self._volume = volume
        self._catalog = catalog
        self._events = events
        self._executor = executor
        self._pod = pod
        self._grace_s = grace_s
        self._trained = TrainedTime()
        self._is_observed = False
        self._sees_ranks = False
        """Leases show when a trainer runs. Without the hook there are none, and training is assumed to run."""
        self._fits: bool | None = None
        """Whether a just-in-time save fits, as logged last; ``None``: not known yet."""

    @property
    def grows(self) -> bool:
        """Whether the time at risk grows: training runs, or is assumed to."""
        return self._trained.runs

    @property
    def has_begun(self) -> bool:
        """Whether a step of this pod's training was reported. Without the hook nobody would: training is assumed to run."""
        trainer = self._pod.present_trainer()
        return not self._sees_ranks or (trainer is not None and trainer.step is not None)

    @property
    def checkpoint_bytes(self) -> int | None:
        """Size of the newest checkpoint; ``None``: none was finished yet."""
        usual = self._usual_save()
        return usual.size_bytes if usual else None

    def observe(self) -> None:
        """Note whether training runs now. Called at each scan of the volume."""
        ranks, now_s = self._volume.held_leases(), time.time()
        if not self._sees_ranks and (ranks or self._pod.trainer() is not None):
            self._sees_ranks = True
            self._trained = TrainedTime()  # what was assumed before it started
        # A sidecar that restarts beside a living trainer counts from the pod's start.
        began_s = now_s if self._is_observed else self._pod.since_s
        self._is_observed = True
        trains = self.has_begun and (bool(ranks) or not self._sees_ranks)
        self._trained = self._trained.seen(trains=trains, now_s=now_s, began_s=began_s)

    def risk(self) -> Risk:
        """Return the risk at this instant."""
        usual = self._usual_save()
        is_small = usual is not None and usual.size_bytes < TELLING_BYTES
        return risk(
            seconds_at_risk=self._seconds_at_risk(),
            durable_step=self._catalog.newest_durable_step,
            trainer_step=self._newest_step(),
            usual=usual,
            bytes_per_s=self._executor.usual_bytes_per_s(roughly=is_small),
            grace_s=self._grace_s,
            store=store_state(self._executor.evidence(), grace_s=self._grace_s),
            limited=self._executor.gate.bytes_per_s is not None,
        )

    def update(self) -> None:
        """Log, once per change, that a just-in-time save no longer fits the grace period, or fits again."""
        now = self.risk()
        before, self._fits = self._fits, fits_now(self._fits, now, grace_s=self._grace_s)
        if self._fits is before or (before is None and self._fits):
            return
        fields: dict[str, Any] = {
            "grace_seconds": self._grace_s,
            "predicted_durable_s": rounded(now.predicted_durable_s),
            "predicted_save_s": rounded(now.predicted_save_s),
            "predicted_flush_s": rounded(now.predicted_flush_s),
        }
        if self._fits:
            self._events.happened("grace_is_enough_again", **fields)
        else:
            self._events.happened("grace_too_short", level="warning", **fields, hint=now.advice)

    def _usual_save(self) -> SaveProfile | None:
        return usual_profile(t.checkpoint for t in self._catalog.all() if t.checkpoint)

    def _seconds_at_risk(self) -> float | None:
        durable = self._catalog.newest_durable
        saved_at_s = durable.checkpoint.created_at_s if durable and durable.checkpoint else self._pod.since_s
        pending = [t.checkpoint.created_at_s for t in self._catalog.pending() if t.checkpoint]
        if not self._sees_ranks and durable is None and not pending:
            return None  # nothing shows when training began, or whether it has
        return self._trained.at_risk_s(durable_at_s=saved_at_s, finished_at_s=max(pending, default=None), now_s=time.time())

    def _newest_step(self) -> int | None:
        trainer = self._pod.trainer()
        if trainer is None or trainer.step is None or self.grows:
            return trainer.step if trainer else None
        pending = [t.checkpoint.resume_step for t in self._catalog.pending() if t.checkpoint]
        steps = [step for step in (*pending, self._catalog.newest_durable_step) if step is not None]
        return max(steps, default=trainer.step)
