"""What needs the store: reach it, then upload, commit, clean and serve resumes."""

from __future__ import annotations

import asyncio

import structlog

from sidecar.core.format import checksum
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.daemon.services import Services
from sidecar.daemon.tasks import run_forever, run_together
from sidecar.download.downloader import Downloader
from sidecar.download.quarantine import Sharing
from sidecar.errors import ConfigurationError, NotFound, StoreError
from sidecar.lifecycle.prefix_lease import PrefixLease, claim
from sidecar.lifecycle.termination import POD
from sidecar.store.protocol import Capabilities, Verification
from sidecar.transfer.executor import awaited
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.orphan_uploads import OrphanUploads
from sidecar.upload.context import StoreLimits, UploadContext
from sidecar.upload.uploader import Uploader

log = structlog.get_logger()

REACH_AGAIN_S = 5.0
"""Seconds until the next try to reach the store."""
PROBE_TRIES = 3
"""Tries of the probe whose objects vanish: another pod's sidecar that starts at the same time may remove them as orphans."""


async def use_store(services: Services) -> None:
    """Reach the store, then run what needs it until cancelled.

    Raises:
        ConfigurationError: The store refuses access, or another job holds the prefix.
    """
    with awaited():
        capabilities, run = await _open_store(services)
    await _opened(services, capabilities)
    lease = _prefix_lease(services, run)
    uploader = _uploader(services, capabilities, lease)
    services.state.store_opened.set()
    node = services.settings.node
    is_first = node is not None and node.index == 0
    if is_first:  # for all nodes: no other job may write below the prefix at this time
        await lease.settle()
    tasks = [run_forever("uploader", uploader.run), run_forever("cleaner", services.cleaner.run)]
    if is_first:
        tasks.append(run_forever("tenancy", lease.keep))
    if services.settings.keep_store is not None:
        tasks.append(run_forever("retention", services.cleaner.run_retention))
    if is_first or node is None:  # for all nodes; where only markers name the node, it may be the first
        orphans = OrphanUploads(
            services.store,
            services.executor,
            services.volume,
            services.catalog,
            services.pod,
            alone=node is not None and node.count == 1,
        )
        tasks.append(run_forever("orphan-uploads", orphans.run))
    sharing = Sharing(services.resume_service.quarantine, services.store, services.executor, node=node)
    tasks.append(run_forever("quarantine", sharing.run))
    await run_together(tasks)


async def _open_store(services: Services) -> tuple[Capabilities, Run]:
    settings, store, vanished = services.settings, services.store, 0
    while True:
        try:
            capabilities = await services.executor.once(store.probe)
            run = await services.executor.once(claim, store, run_id=settings.run_id, job=settings.job)
        except StoreError as error:
            if isinstance(error, NotFound) and vanished < PROBE_TRIES:
                vanished += 1
                continue
            if settings.verify_access and not error.transient:
                raise ConfigurationError(str(error)) from None
            services.health.failed(error)
            await asyncio.sleep(REACH_AGAIN_S)
        else:
            log.info("store_opened", run_id=run.run_id, verification=capabilities.verification.value)
            return capabilities, run


async def _opened(services: Services, capabilities: Capabilities) -> None:
    """Take note of what the store can do, and let resumes begin once the volume was scanned."""
    services.state.capabilities = capabilities
    services.executor.is_away(capabilities.round_trip_s)
    if capabilities.verification is Verification.OFF:
        log.warning("uploads_are_not_verified", hint="CKPT_VERIFY=off: a store that damages bytes is found out at resume")
    await services.inventory.scanned.wait()
    is_remote = capabilities.round_trip_s is not None
    downloader = Downloader(services.store, services.volume, services.executor, is_remote=is_remote)
    services.resume_service.opened(downloader)
    if services.settings.resume == "eager" and not services.volume.held_leases():
        services.resume_service.begin_early()


def _prefix_lease(services: Services, run: Run) -> PrefixLease:
    settings, termination = services.settings, services.termination
    life = checksum.to_text(checksum.checksum(services.volume.read_state(POD) or services.token.encode()))
    return PrefixLease(
        services.store,
        services.executor,
        run,
        me=f"{settings.pod}/{life[:8]}",
        node=settings.node,
        job=settings.job,
        going=termination.is_going,
        attempt=termination.trainer_attempt,
    )


def _uploader(services: Services, capabilities: Capabilities, lease: PrefixLease) -> Uploader:
    context = UploadContext(
        store=services.store,
        limits=StoreLimits(capabilities),
        executor=services.executor,
        committer=Committer(services.store, services.executor),
        catalog=services.catalog,
        flush=services.flush,
        pod=services.pod,
        lease=lease,
        quarantine=services.resume_service,
    )
    return Uploader(
        context,
        volume=services.volume,
        scanner=services.scanner,
        hints=services.hints,
        skip_superseded=services.settings.superseded == "skip",
    )
