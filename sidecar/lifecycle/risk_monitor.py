"""Time at risk of the running training, and the warning when a just-in-time save does not fit the grace period."""

from __future__ import annotations

import time
from typing import Any

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events, rounded
from sidecar.core.lifecycle.risk import Risk, fits_now, risk
from sidecar.core.lifecycle.save_profile import usual_profile
from sidecar.core.schedule.throughput import TELLING_BYTES
from sidecar.lifecycle.termination import Termination
from sidecar.transfer.executor import StoreExecutor


class RiskMonitor:
    """Computes the risk from the catalog, the trainer's step and the measured throughput."""

    def __init__(
        self, catalog: Catalog, events: Events, executor: StoreExecutor, termination: Termination, *, grace_s: float
    ) -> None:
        self._catalog = catalog
        self._events = events
        self._executor = executor
        self._termination = termination
        self._grace_s = grace_s
        self._started_at_s = time.time()
        self._fits: bool | None = None
        """Whether a just-in-time save fits, as logged last; ``None``: not known yet."""

    def risk(self) -> Risk:
        """Return the risk at this instant."""
        trainer, durable = self._termination.trainer(), self._catalog.newest_durable
        usual = usual_profile(t.checkpoint for t in self._catalog.all() if t.checkpoint)
        rate = self._executor.rate(roughly=usual is not None and usual.size_bytes < TELLING_BYTES)
        durable_at_s = durable.checkpoint.created_at_s if durable and durable.checkpoint else None
        return risk(
            durable_at_s=durable_at_s if durable_at_s is not None else self._started_at_s,
            durable_step=self._catalog.newest_durable_step,
            trainer_step=trainer.step if trainer else None,
            usual=usual,
            bytes_per_s=rate.expected if rate else None,
            grace_s=self._grace_s,
            now_s=time.time(),
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
