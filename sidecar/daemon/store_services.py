"""Services that need the store: uploads, retention, orphan cleanup and resumes. They start once it was reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

from sidecar.core.format import checksum
from sidecar.core.lifecycle.fencing import TWO_AT_ONCE_HINT, Holder
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.daemon.services import Services
from sidecar.download.downloader import Downloader
from sidecar.download.quarantine import Sharing
from sidecar.errors import (
    AccessRefused,
    ConfigurationError,
    CorruptObject,
    Fenced,
    NotFound,
    StoreError,
    StoreFull,
    UnreadableRun,
)
from sidecar.lifecycle.pod_record import POD
from sidecar.lifecycle.run_document import claim, owner
from sidecar.store.protocol import Capabilities, Verification
from sidecar.tasks import run_forever, run_together
from sidecar.transfer.executor import awaited
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.earlier_commits import EarlierCommits
from sidecar.upload.commit.orphan_uploads import OrphanUploads
from sidecar.upload.context import StoreLimits, UploadContext
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.upload.uploader import Uploader
from sidecar.upload.versions import VolumeVersions

log = structlog.get_logger()

FENCED_HINT = f"the trainer is told to stop. If two pods of this job run at once on purpose: {TWO_AT_ONCE_HINT}"

REACH_RETRY_S = 5.0
"""Seconds between two tries to reach the store."""
CLOCK_SKEW = "RequestTimeTooSkewed"
"""S3's code for a request whose time differs too much from the store's."""
PROBE_TRIES = 3
"""Retries of a probe whose objects vanish: another sidecar that starts at the same time may delete them as orphans."""


async def use_store(services: Services) -> None:
    """Reach the store, then run the services that need it until cancelled.

    Raises:
        ConfigurationError: The store refuses access, or another job holds the prefix.
    """
    try:
        await _use_store(services)
    except Fenced:  # at the start; later, a task of its own waits for it
        _on_fenced(services)


async def _use_store(services: Services) -> None:
    lease, take_over, is_first = services.lease, services.take_over, services.settings.is_first
    with awaited():
        capabilities, run = await _open_store(services)
        lease.begin(run, _holder(services))
        if is_first:  # the other nodes resume the step that node 0 chooses, and commit what it declares
            await _retried_after_damage(services.holder_watch.wait_for_ending)
        if is_first and take_over.is_at_once:  # before a resume is decided: no earlier pod commits after it
            await _retried_after_damage(take_over.settle)
    await _apply_capabilities(services, capabilities)
    committer = Committer(services.store, services.executor, lease=services.lease)
    uploader = _uploader(services, capabilities, committer)
    services.executor.on_back = uploader.store_is_back
    services.state.store_opened.set()
    if is_first and not lease.is_held:  # node 0 holds the lease for all nodes of the job
        with awaited():
            await _retried_after_damage(take_over.settle)
    if lease.is_held or not is_first:
        services.store_reader.grant()
    await run_together([run_forever("uploader", uploader.run), *_tasks_beside_uploads(services, committer)])


def _tasks_beside_uploads(services: Services, committer: Committer) -> list[Coroutine[Any, Any, None]]:
    """Return the tasks that need the store and its lease: renewal, retention, orphans, earlier commits, shared quarantine."""
    tasks, node, is_first = list[Coroutine[Any, Any, None]](), services.settings.node, services.settings.is_first
    tasks.append(run_forever("store-watch", services.store_watch.run))
    if is_first:
        tasks.append(run_forever("lease", services.renewal.keep))
        tasks.append(_settle_later(services))
        tasks.append(_end_when_fenced(services))
    else:
        tasks.append(run_forever("attempts", services.renewal.learn_epochs))
    if services.store_cleaner is not None:
        tasks.append(run_forever("retention", services.store_cleaner.run))
    if is_first or node is None:  # once per job; without a node in the settings, this may be node 0
        orphans = OrphanUploads(
            services.store,
            services.executor,
            services.volume,
            services.catalog,
            services.termination.deadline,
            alone=node is not None and node.count == 1,
        )
        tasks.append(run_forever("orphan-uploads", orphans.run))
        tasks.append(run_forever("earlier-commits", _earlier_commits(services, committer).run))
    sharing = Sharing(services.quarantine, services.store, services.executor, node=node)
    tasks.append(run_forever("quarantine", sharing.run))
    return tasks


async def _settle_later(services: Services) -> None:
    await _retried_after_damage(services.take_over.settle_later)
    if services.lease.is_held:
        services.store_reader.grant()


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
            if settings.verify_access and not error.transient and not _passes_by_itself(error):
                raise ConfigurationError(str(error)) from None
            services.health.failed(error, store)
            if isinstance(error, StoreFull) and services.store_reader.downloader is None:
                await _resume_from_full_store(services)
            await asyncio.sleep(REACH_RETRY_S)
        else:
            services.health.ended(store)
            log.info("store_opened", run_id=run.run_id, verification=capabilities.verification.value)
            return capabilities, run


async def _resume_from_full_store(services: Services) -> None:
    """Let the training resume from a full store: reading needs no lease of the prefix.

    The prefix is taken over once the store has space. Until then an earlier pod that was cut off may still commit. This run
    does not resume from such a checkpoint, and its own later commits replace it. If another job may hold the prefix, the resume
    waits for space, too: a full store takes no request for a sign of life.

    Raises:
        ConfigurationError: Another job holds the prefix.
    """
    settings, store = services.settings, services.store
    try:
        run = await services.executor.once(owner, store, run_id=settings.run_id, job=settings.job)
    except StoreError as error:
        log.warning("full_store_not_read", error=str(error), hint="it is tried again")
        return
    log.warning("store_is_full", store=store.url, hint="it is read, so that the training can resume; uploads wait for space")
    if run is not None and settings.is_first:
        services.lease.begin(run, _holder(services))
        await _retried_after_damage(services.holder_watch.wait_for_ending)
    if run is None or not settings.is_first or services.take_over.is_ours_unasked:
        services.store_reader.grant()
    await _begin_resumes(services, is_remote=store.url.startswith("s3:"))


async def _retried_after_damage(work: Callable[[], Awaitable[None]]) -> None:
    """Run one step of the start. It is retried while the store's answers arrive damaged.

    Raises:
        ConfigurationError: A document of the run is unreadable: an operator has to correct it.
    """
    while True:
        try:
            return await work()
        except CorruptObject as error:
            log.warning("start_waits", error=str(error), hint="it is tried again; is the way to the store sound?")
            await asyncio.sleep(REACH_RETRY_S)
        except UnreadableRun as error:
            raise ConfigurationError(str(error)) from None


def _passes_by_itself(error: StoreError) -> bool:
    """Whether a refusal may end without a change of settings.

    A wrong clock is corrected, space in the store is freed, and damage in transit is rare.
    """
    return isinstance(error, CorruptObject | StoreFull) or (isinstance(error, AccessRefused) and error.code == CLOCK_SKEW)


async def _apply_capabilities(services: Services, capabilities: Capabilities) -> None:
    """Apply the store's capabilities, and start resumes once the volume was scanned."""
    services.state.capabilities = capabilities
    services.executor.set_round_trip(capabilities.round_trip_s)
    if capabilities.verification is Verification.OFF:
        log.warning("uploads_are_not_verified", hint="CKPT_VERIFY=off: damage by the store is detected at resume only")
    if capabilities.ends_with_container:
        log.warning(
            "store_ends_with_container", store=services.store.url, hint="mount a volume that lasts there, such as a PVC"
        )
    if services.store_reader.downloader is None:
        await _begin_resumes(services, is_remote=capabilities.round_trip_s is not None)


async def _begin_resumes(services: Services, *, is_remote: bool) -> None:
    await services.inventory.scanned.wait()
    downloader = Downloader(services.store, services.volume, services.executor, is_remote=is_remote)
    services.store_reader.opened(downloader)
    if services.settings.resume == "eager" and not services.volume.held_leases():
        services.resume_service.prefetch()


def _holder(services: Services) -> Holder:
    settings = services.settings
    # A UID is one pod's, also if two pods share a volume. A host name is not: its state says which start it is.
    life = checksum.text_of(services.volume.read_state(POD) or services.token_file.token.encode())
    return Holder(
        name=settings.pod if settings.pod_is_unique else f"{settings.pod}/{life[:8]}",
        is_unique=settings.pod_is_unique,
        node=settings.node,
        job=settings.job,
        run_id=settings.run_id,
    )


async def _end_when_fenced(services: Services) -> None:
    await services.lease.fenced.wait()
    _on_fenced(services)


def _on_fenced(services: Services) -> None:
    reason = services.lease.fenced_by
    services.events.happened("fenced", level="error", reason=reason, hint=FENCED_HINT)
    services.termination.fenced(reason)


def _earlier_commits(services: Services, committer: Committer) -> EarlierCommits:
    return EarlierCommits(
        services.store,
        services.executor,
        committer,
        services.catalog,
        services.quarantine,
        services.events,
        resumes=services.resume_service,
        deadline=services.termination.deadline,
    )


def _uploader(services: Services, capabilities: Capabilities, committer: Committer) -> Uploader:
    context = UploadContext(
        store=services.store,
        limits=StoreLimits(capabilities),
        executor=services.executor,
        committer=committer,
        catalog=services.catalog,
        flush=services.flush,
        pod=services.pod,
        deadline=services.termination.deadline,
        lease=services.lease,
        quarantine=services.quarantine,
    )
    early = EarlyUploads(context, services.volume, services.hints)
    versions = VolumeVersions(context, services.volume, services.scanner, early)
    return Uploader(context, versions, early, skip_superseded=services.settings.superseded == "skip")
