"""Phase of the sidecar: decided at each notice and every ``PHASE_POLL_S`` seconds. No other module sets it."""

from __future__ import annotations

import asyncio

import structlog

from sidecar.catalog.events import rounded
from sidecar.core.lifecycle.phases import Phase, Situation, next_phase
from sidecar.daemon.services import Services
from sidecar.tasks import within

log = structlog.get_logger()

PHASE_POLL_S = 0.2
"""Interval of decisions in seconds."""
LAST_SCAN_S = 1.0
"""Maximum seconds to wait for the last scan of the volume, which may hang."""


class PhaseControl:
    """Moves through the phases (FORMAT.md, "Lifecycle")."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._noticed = asyncio.Event()
        self._last_scan: asyncio.Task[None] | None = None
        """The last scan of the volume; on a volume that hangs it does not end."""

    def decide_now(self) -> None:
        """Decide the phase at once: there is a notice."""
        self._noticed.set()

    async def run(self) -> None:
        """Change the phase until it is done."""
        services = self._services
        while services.state.phase is not Phase.DONE:
            phase = await self._next_phase()
            if phase is not services.state.phase:
                before, services.state.phase = services.state.phase, phase
                left_s = rounded(services.termination.deadline.left_s())
                services.events.happened("phase_changed", phase=phase.value, before=before.value, left_s=left_s)
            if phase is not Phase.DONE:
                left_s = services.termination.deadline.left_s()
                await self._wait(PHASE_POLL_S if left_s is None else min(PHASE_POLL_S, max(0.01, left_s)))

    async def _wait(self, seconds: float) -> None:
        """Return after ``seconds``, or at the next notice."""
        await within(seconds, self._noticed.wait())
        self._noticed.clear()

    async def _next_phase(self) -> Phase:
        before, now = self._services.state.phase, self._situation()
        phase = next_phase(before, now)
        if phase is before or phase not in (Phase.FLUSHING, Phase.DONE) or _is_out_of_time(now):
            return phase
        # The trainer may have finished a checkpoint just before its end: it is scanned for before the sidecar is done.
        scanned, now = await self._scan_once_more(), self._situation()
        phase = next_phase(before, now)
        return before if phase is Phase.DONE and not scanned and not _is_out_of_time(now) else phase

    async def _scan_once_more(self) -> bool:
        """Return whether a scan that was started by this call has ended."""
        is_new = self._last_scan is None
        scan = self._last_scan or asyncio.create_task(self._services.scanner.scan())
        self._last_scan = scan
        left_s = self._services.termination.deadline.left_s()
        await asyncio.wait({scan}, timeout=LAST_SCAN_S if left_s is None else min(LAST_SCAN_S, max(0.0, left_s)))
        if not scan.done():
            return False
        self._last_scan = None
        if (error := scan.exception()) is not None:
            log.warning("last_look_failed", error=str(error))
        return is_new and error is None

    def _situation(self) -> Situation:
        services, termination = self._services, self._services.termination
        is_noticed, succeeded = termination.deadline.is_set(), services.pod.trainer_succeeded()
        may_end = succeeded or is_noticed or termination.sigterms > 0 or termination.fenced_by is not None
        return Situation(
            ready=services.state.store_opened.is_set() and services.inventory.scanned.is_set(),
            notice=is_noticed,
            sigterm=termination.sigterms > 0,
            # Without leases that is a walk of the volume: only where the phase depends on it.
            trainer_alive=may_end and services.pod.trainer_alive(),
            trainer_succeeded=succeeded,
            classic=services.settings.mode == "classic",
            everything_durable=services.inventory.everything_durable(),
            deadline_passed=termination.deadline.is_within(0.0),
            cut_short=termination.sigterms > 1,
            fenced=termination.fenced_by is not None,
        )


def _is_out_of_time(now: Situation) -> bool:
    return now.cut_short or now.deadline_passed
