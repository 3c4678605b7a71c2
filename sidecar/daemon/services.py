"""Services that live as long as the process. All are created at start, and none is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.durations import Durations
from sidecar.catalog.events import Events
from sidecar.catalog.inventory import Inventory
from sidecar.catalog.scanner import Scanner
from sidecar.core.format.attempts import Seen
from sidecar.core.lifecycle.phases import Phase
from sidecar.daemon.settings import Settings
from sidecar.download.local_copies import LocalCopies
from sidecar.download.quarantine import Quarantine
from sidecar.download.request_worker import RequestWorker
from sidecar.download.resume_service import ResumeService
from sidecar.download.store_reader import StoreReader
from sidecar.lifecycle.holder_watch import HolderWatch
from sidecar.lifecycle.pod import Pod
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.lifecycle.renewal import Renewal
from sidecar.lifecycle.risk_monitor import RiskMonitor
from sidecar.lifecycle.save_requests import SaveRequests
from sidecar.lifecycle.take_over import TakeOver
from sidecar.lifecycle.termination import Termination
from sidecar.retention.known_steps import KnownSteps
from sidecar.retention.store_cleaner import StoreCleaner
from sidecar.retention.store_retention import StoreRetention
from sidecar.retention.volume_cleaner import VolumeCleaner
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from sidecar.transfer.store_watch import StoreWatch
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.volume.token_file import TokenFile
from sidecar.volume.volume import Volume
from sidecar.volume.watch import Hints
from trainer_hook.contract import TOKEN

T = TypeVar("T")


class DaemonState:
    """Phase, capabilities of the store, and the end. Only the daemon writes it; the API reads it."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.capabilities: Capabilities | None = None
        """Capabilities of the store; ``None`` until it was reached."""
        self.store_opened = asyncio.Event()
        """The store was reached, and uploads and downloads may begin."""
        self.ended = asyncio.Event()
        """The exit code is decided: calls of the API that still wait are answered."""

    async def unless_ended(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``waiting``, or ``None`` if the sidecar ends first."""
        task, end = asyncio.create_task(waiting), asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            end.cancel()


class Services:
    """All services. Created inside the event loop; the daemon runs them, the API reads their state."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self.settings: Final = settings
        self.store: Final = store
        self.state: Final = DaemonState()
        self.events: Final = Events()
        self.durations: Final = Durations()
        self.events.observe(self.durations.happened)
        # Pod and scanner are created later, because they need the catalog or the volume.
        self.catalog: Final = Catalog(self.events, seen=lambda: Seen(self.pod.present_attempt(), self.scanner.found_in))
        self.volume: Final = Volume(settings.dir, settings.state_dir)
        self.token_file: Final = TokenFile(self.volume / TOKEN)
        self.hints: Final = Hints(self.volume)
        self.health: Final = Health(self.events.happened)
        self.executor: Final = StoreExecutor(
            concurrency=settings.concurrency,
            gate=RateGate(settings.bandwidth_limit),
            health=self.health,
            part_bytes=settings.part_size,
        )
        self.flush: Final = FlushControl(self.executor, self.events)
        self.termination: Final = Termination(self.volume, grace_s=settings.grace_seconds)
        self.pod: Final = Pod(settings, self.volume, self.termination)
        self.scanner: Final = Scanner(self.volume, self.catalog, self.pod.identity, store.key_limits)
        self.inventory: Final = Inventory(self.volume, self.catalog, self.scanner)
        self.lease: Final = PrefixLease(store, self.executor, self.pod, self.termination.deadline, self.scanner.found_in)
        self.renewal: Final = Renewal(self.lease)
        self.holder_watch: Final = HolderWatch(self.lease)
        self.take_over: Final = TakeOver(self.lease, self.renewal, self.holder_watch)
        self.save_requests: Final = SaveRequests(self.volume, self.catalog, self.events)
        self.risk_monitor: Final = self._risk_monitor()
        self.store_watch: Final = self._store_watch()
        self.store_reader: Final = StoreReader(self.health)
        self.quarantine: Final = Quarantine(self.volume.journal / "quarantine.json")
        # A finding about a checkpoint no longer holds once it is committed again.
        self.catalog.observe(lambda t: self.quarantine.committed(t.name, committed_at_s=t.committed_at_s))
        worker = self._request_worker()
        self.resume_service: Final = ResumeService(worker, self.store_reader, enabled=settings.resume != "off")
        self.volume_cleaner: Final = self._volume_cleaner(worker.local)
        self.store_cleaner: Final = self._store_cleaner()

    def _risk_monitor(self) -> RiskMonitor:
        grace_s = self.settings.grace_seconds
        return RiskMonitor(self.volume, self.catalog, self.events, self.executor, self.pod, grace_s=grace_s)

    def _store_watch(self) -> StoreWatch:
        return StoreWatch(
            self.store,
            self.executor,
            is_wanted=lambda: self.risk_monitor.grows or bool(self.catalog.pending()),
            grace_s=self.settings.grace_seconds,
        )

    def _request_worker(self) -> RequestWorker:
        return RequestWorker(
            volume=self.volume,
            catalog=self.catalog,
            events=self.events,
            node=self.settings.node,
            quarantine=self.quarantine,
            inventory=self.inventory,
            reader=self.store_reader,
            # The cleaner is created later, because it needs the local copies of this worker.
            make_room=lambda wanted_bytes: self.volume_cleaner.make_room(wanted_bytes),
        )

    def _volume_cleaner(self, local: LocalCopies) -> VolumeCleaner:
        return VolumeCleaner(
            settings=self.settings,
            volume=self.volume,
            catalog=self.catalog,
            resume_service=self.resume_service,
            local=local,
        )

    def _store_cleaner(self) -> StoreCleaner | None:
        """Return the cleaner of the store; ``None``: ``CKPT_KEEP_STORE`` is not set."""
        if self.settings.keep_store is None:
            return None
        retention = StoreRetention(
            self.store,
            self.executor,
            keep_newest=self.settings.keep_store,
            keep_every_steps=self.settings.keep_every_steps,
            known=KnownSteps(self.catalog, self.resume_service, self.quarantine),
            events=self.events,
            lease=self.lease,
        )
        return StoreCleaner(self.catalog, retention, node=self.settings.node)
