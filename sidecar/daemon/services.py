"""The parts that live as long as the sidecar, in one place: the daemon moves them, the API looks at them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.catalog.scanner import SETTLE_S, Scanner
from sidecar.core.format.attempts import Restart, of_pod
from sidecar.core.format.found_checkpoint import Identity
from sidecar.core.lifecycle.phases import Phase
from sidecar.core.lifecycle.risk import Risk, fits_now, risk
from sidecar.core.lifecycle.save_profile import usual_profile
from sidecar.core.schedule.flush import Outcome, Plan
from sidecar.core.schedule.throughput import TELLING_BYTES
from sidecar.daemon.settings import Settings
from sidecar.download.resume_service import ResumeService
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.lifecycle.save_requests import SaveRequests
from sidecar.lifecycle.termination import Termination
from sidecar.store.protocol import Capabilities
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from sidecar.volume.volume import Volume
from trainer_hook.contract import step_of

T = TypeVar("T")

UNLEASED_QUIET_S = 2.0
"""A trainer without leases counts as alive while it wrote to an unfinished checkpoint this lately (classic mode)."""


class Services:
    """Made once, at start, inside the event loop."""

    def __init__(self, settings: Settings, *, store_url: str) -> None:
        self.settings = settings
        self.store_url = store_url
        self.started_at_s = time.time()
        self.token = secrets.token_urlsafe(32)
        self.phase = Phase.STARTING
        self.capabilities: Capabilities | None = None
        """What the store can do; ``None`` until it was reached."""
        self.make_room: Callable[[int], Awaitable[list[str]]] | None = None
        """Drops durable checkpoints from the volume until so many bytes are free; ``None`` until the store was reached."""
        self._fits: bool | None = None
        """Whether a just-in-time save fits the grace period, as it was said last."""
        self.lease: PrefixLease | None = None
        """This pod's share of the lease of the prefix; ``None`` until the store was reached."""
        self.plan: Plan | None = None
        """What is sent in the time that is left, while the pod is going."""
        self.scanned = asyncio.Event()
        """What an earlier life held was taken over, and the volume was looked at once."""
        self.ended = asyncio.Event()
        """The exit code is decided: whoever still waits for an answer is given one."""
        self.events = Events()
        self.catalog = Catalog(self.events)
        self.volume = Volume(settings.dir, settings.state_dir)
        self.health = Health(self._on_health)
        self.executor = StoreExecutor(
            concurrency=settings.concurrency,
            gate=RateGate(settings.bandwidth_limit),
            health=self.health,
            part_bytes=settings.part_size,
        )
        self.scanner = Scanner(self.volume, self.catalog, self.identity)
        self.termination = Termination(self.volume, grace_s=settings.grace_seconds)
        self.save_requests = SaveRequests(self.volume, self.catalog, self.events)
        self.resume_service = ResumeService(
            volume=self.volume,
            catalog=self.catalog,
            events=self.events,
            health=self.health,
            node=settings.node,
            enabled=settings.resume != "off",
            look_at_volume=self._look_at_volume,
        )

    def identity(self) -> Identity:
        """Return what this pod is when a marker does not say. Ask once the volume was taken: it knows since when."""
        settings = self.settings
        attempt = of_pod(
            settings.pod, since_s=self.termination.pod_since_s, restart=Restart(*settings.restart) if settings.restart else None
        )
        return Identity(settings.node, attempt)

    def left_s(self) -> float | None:
        """Return the seconds until the deadline, or ``None`` while the pod stays."""
        return self.termination.left_s()

    def trainer_alive(self) -> bool:
        """Whether a training process still runs: a lease is held, or, without leases, something is still written."""
        if self.volume.held_leases():
            return True
        if self.settings.mode != "classic" or self.termination.trainer() is not None:
            return False
        try:
            newest_s = max(self.volume.unfinished().values(), default=0.0)
        except OSError:  # the volume is away: nothing is seen to be written there
            return False
        return time.time() - newest_s < UNLEASED_QUIET_S

    def planned(self, plan: Plan | None) -> None:
        """Take note of a plan, and say what of it is news."""
        self.plan = plan
        if plan is None:
            return
        self.events.happened(
            "flush_planned",
            level="warning" if any(p.verdict is Outcome.NO_TIME for p in plan.order) else "info",
            order={p.name: p.verdict.value for p in plan.order},
            left_s=_rounded(self.termination.left_s()),
            why={p.name: p.reason for p in plan.order if p.reason},
        )

    def attempt(self) -> str:
        """Return the id of the attempt that the trainer makes now: what the hook says, else what markers without one mean."""
        trainer = self.termination.trainer()
        return (trainer.attempt if trainer else None) or self.identity().attempt

    def everything_durable(self) -> bool:
        """Whether nothing that the trainer finished, or is finishing at this instant, is still to be uploaded."""
        return not self.catalog.pending() and self.unseen() is None

    def unseen(self) -> str | None:
        """Return why there may be something finished that nobody knows of yet, or ``None``."""
        if not self.scanned.is_set():
            return "the volume was not looked at yet"
        if self.scanner.unsettled:
            return "a checkpoint on the volume is still being looked at"
        try:
            self.volume.names()
        except OSError as error:
            return f"the volume cannot be read: {error.strerror}"
        return None

    async def _look_at_volume(self) -> None:
        """See everything that the trainer finished up to now."""
        await self.look()
        while self.scanner.unsettled:
            await self.settled()

    async def settled(self) -> None:
        """Wait for the next change of a checkpoint, or until a marker that is being written may be looked at again."""
        try:
            async with asyncio.timeout(SETTLE_S if self.unseen() else None):
                await self.catalog.changed()
        except TimeoutError:
            await self.look()

    async def look(self) -> None:
        """Look at the volume once. A look that nobody waits for any more goes on: what it found half-way is not forgotten."""
        await asyncio.shield(asyncio.create_task(self.scanner.scan()))

    async def unless_ended(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Return what ``waiting`` returns, or ``None`` when the sidecar ends first."""
        task, end = asyncio.create_task(waiting), asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            end.cancel()

    def unfinished(self) -> dict[str, str]:
        """Return what the trainer began and did not finish, beyond the newest durable step, and what became of it."""
        try:
            names = [name for name in self.volume.names() if self.volume.marker_signature(name) is None]
        except OSError:
            return {}
        durable = self.catalog.newest_durable_step
        fresh = [name for name in names if (step := step_of(name)) is not None and (durable is None or step > durable)]
        alive = self.trainer_alive()
        reason = "the trainer was still writing it" if alive else "the trainer ended before it was finished"
        return dict.fromkeys(fresh, reason)

    def newest(self) -> Tracked | None:
        """Return the newest finished checkpoint that this pod knows."""
        steps = {
            t.checkpoint.resume_step: t for t in self.catalog.all() if t.checkpoint and t.checkpoint.resume_step is not None
        }
        return steps[max(steps)] if steps else None

    def risk(self) -> Risk:
        """Return the time at risk now."""
        trainer, durable = self.termination.trainer(), self.catalog.newest_durable
        usual = usual_profile(t.checkpoint for t in self.catalog.all() if t.checkpoint)
        rate = self.executor.rate(roughly=usual is not None and usual.size_bytes < TELLING_BYTES)
        durable_at_s = durable.checkpoint.created_at_s if durable and durable.checkpoint else None
        return risk(
            durable_at_s=durable_at_s if durable_at_s is not None else self.started_at_s,
            durable_step=self.catalog.newest_durable_step,
            trainer_step=trainer.step if trainer else None,
            usual=usual,
            bytes_per_s=rate.expected if rate else None,
            grace_s=self.settings.grace_seconds,
            now_s=time.time(),
            limited=self.executor.gate.bytes_per_s is not None,
        )

    def watch_risk(self) -> None:
        """Say, once per change, that a just-in-time save does not fit the grace period, or that it does again."""
        now, grace_s = self.risk(), self.settings.grace_seconds
        before, self._fits = self._fits, fits_now(self._fits, now, grace_s=grace_s)
        if self._fits is before or (before is None and self._fits):
            return
        told: dict[str, Any] = {
            "grace_seconds": grace_s,
            "predicted_durable_s": _rounded(now.predicted_durable_s),
            "predicted_save_s": _rounded(now.predicted_save_s),
            "predicted_flush_s": _rounded(now.predicted_flush_s),
        }
        if self._fits:
            self.events.happened("grace_is_enough_again", **told)
        else:
            self.events.happened("grace_too_short", level="warning", **told, hint=now.advice)

    def _on_health(self, trouble: str | None) -> None:
        if trouble is None:
            self.events.happened("store_reached_again")
        else:
            hint = "training goes on; uploads are tried again for ever"
            self.events.happened("store_degraded", level="error", error=trouble, hint=hint)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
