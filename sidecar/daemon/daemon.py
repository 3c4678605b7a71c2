"""The running sidecar: starts every part, moves through the phases, and ends with a report.

Who gets which signal when: as a native sidecar SIGTERM arrives after the trainer ended; as a classic one at the same
instant as the trainer's. Both are the same to this program: it goes on until no rank's lease is held and all that is
finished is durable, or the deadline passes. The API answers until the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import structlog

from sidecar.api.app import create_app, create_metrics_app
from sidecar.api.server import Server, listen
from sidecar.api.token import TokenFile
from sidecar.catalog.scanner import SETTLE_S
from sidecar.core.format import checksum
from sidecar.core.lifecycle.phases import Phase, Situation, next_phase
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.core.lifecycle.spot import SpotNotice
from sidecar.core.lifecycle.states import State
from sidecar.daemon import exit_report
from sidecar.daemon.services import Services
from sidecar.daemon.settings import Settings
from sidecar.download.downloader import Downloader
from sidecar.download.quarantine import Sharing
from sidecar.errors import ConfigurationError, Fenced, NotFound, SidecarError, StoreError
from sidecar.lifecycle.prefix_lease import Holder, PrefixLease
from sidecar.lifecycle.run_document import claim
from sidecar.lifecycle.spot import SpotWatch
from sidecar.lifecycle.termination import POD
from sidecar.retention.cleaner import Cleaner
from sidecar.store.protocol import Capabilities, Store, Verification
from sidecar.transfer.executor import awaited
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.orphan_uploads import OrphanUploads
from sidecar.upload.context import StoreLimits, UploadContext
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.uploader import Uploader
from sidecar.volume.lock import LOCK, hold_volume
from sidecar.volume.opener import Place
from sidecar.volume.sockets import listen_unix
from sidecar.volume.watch import Hints
from trainer_hook.contract import API_SOCKET, TOKEN

log = structlog.get_logger()

SCAN_S = 1.0
"""Longest time between two scans of the volume."""
TICK_S = 0.2
"""How often the phase is decided again while the pod is going."""
STORE_AGAIN_S = 5.0
SERVICE_AGAIN_S = 1.0
"""How long a service that ended by a mistake or a failing volume rests before it is started again."""
LAST_LOOK_S = 1.0
"""How long the last look at the volume may take before the phases go on without it; a volume may hang."""
PROBE_TRIES = 3
"""Another pod's sidecar that starts at the same time may take what our probe is writing for a leftover."""
CALLS_END_S = 0.2
"""What answers under way are given at the end."""
REPORT_S = 0.25
"""How long the exit may be held by writing its report: a volume may hang."""
_NOT_BELIEVED = (
    "the trainer can write to them and CKPT_STATE_DIR is set: removed; what they knew is found out again, or sent again"
)


class Daemon:
    """One life of the sidecar."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.services = Services(settings, store_url=store.url)
        self.services.executor.on_hurry = store.hurry
        self._hints = Hints(self.services.volume)
        self._opened = asyncio.Event()
        self._noticed = asyncio.Event()
        """The pod is going: the phase is decided again at once."""
        self.services.termination.on_notice = self._on_notice
        self._token_file = TokenFile(self.services.volume / TOKEN, self.services.token)
        self._look: asyncio.Task[None] | None = None
        """The last look at the volume. On a volume that hangs it is left behind."""

    async def run(self) -> int:
        """Run until told to end. Returns the exit code.

        Raises:
            ConfigurationError: The volume, the store or the port cannot be used.
        """
        services = self.services
        if not await self._take_volume():
            return exit_report.ended_waiting(services.volume)
        _on_signals(self._on_sigterm)
        servers = self._servers()
        gc.freeze()  # what imports made stays as long as the process: no later collection looks at it again
        gc.enable()
        log.info("sidecar_started", store=self._store.url, dir=str(self._settings.dir), api_port=self._settings.api_port)
        tasks = asyncio.create_task(_together(self._tasks()))
        api = asyncio.create_task(_together([server.serve() for server in servers]))
        done = asyncio.create_task(self._until_done())
        try:
            await asyncio.wait({tasks, api, done}, return_when=asyncio.FIRST_COMPLETED)
            for task in (tasks, api, done):
                if task.done():
                    task.result()
            code = await self._finish()
            await self._end_calls(servers, api)
        except* SidecarError as group:
            raise _first(group) from None
        except* Exception:
            log.exception("sidecar_failed")
            await self._finish()
            raise
        finally:
            for task in (tasks, api, done):
                task.cancel()
            services.executor.close()
            self._hints.stop()
            with contextlib.suppress(OSError):
                (services.volume / API_SOCKET).remove()
        return code

    async def _end_calls(self, servers: list[Server], api: asyncio.Task[None]) -> None:
        # The margin before SIGKILL is half a second where the grace period is short: nobody is waited for longer.
        for server in servers:
            server.stop()
        await asyncio.wait({api}, timeout=CALLS_END_S)

    async def _take_volume(self) -> bool:
        """Prepare the volume, once it is ours alone. Returns false if we were told to end first."""
        told_to_end, volume = asyncio.Event(), self.services.volume
        _on_signals(told_to_end.set)
        try:
            volume.prepare_state()
        except OSError as error:
            raise ConfigurationError(
                f"CKPT_STATE_DIR={self._settings.state_dir}: {error.strerror}: mount an emptyDir there, "
                f"into the sidecar alone, writable for user {os.geteuid()}"
            ) from None
        try:
            volume.prepare()
            if not await hold_volume(volume / LOCK, told_to_end=told_to_end):
                return False
            self._token_file.publish()
            if journals := volume.forget_journals_of_trainer():
                log.warning("journals_not_believed", journals=len(journals), hint=_NOT_BELIEVED)
        except OSError as error:
            raise ConfigurationError(
                f"CKPT_DIR={self._settings.dir}: {error.filename or 'it'}: {error.strerror}: "
                f"mount the volume that the trainer writes to, writable for user {os.geteuid()}"
            ) from None
        self.services.termination.begin(self._settings.pod)
        return True

    def _servers(self) -> list[Server]:
        settings = self._settings
        sockets = [listen("127.0.0.1", settings.api_port, setting="CKPT_API_PORT")]
        sockets += _listen_unix(self.services.volume / API_SOCKET)
        servers = [Server(create_app(self.services), sockets)]
        if settings.metrics_bind:
            host, port = settings.metrics_bind
            metrics = listen(host, port, setting="CKPT_METRICS_BIND")
            servers.append(Server(create_metrics_app(self.services), [metrics], any_host=True))
        return servers

    def _tasks(self) -> list[Coroutine[Any, Any, None]]:
        self._hints.start()
        tasks = [_kept_up("watch", self._watch), self._use_store()]
        if self._token_file.is_late:
            tasks.append(_kept_up("token", self._token_file.run))
        if self._settings.spot != "off":
            spot = SpotWatch(
                self._settings.spot, self._settings.spot_endpoint, on_notice=self._on_spot_notice, on_hint=self._on_spot_hint
            )
            tasks.append(_kept_up("spot", spot.run))
        return tasks

    def _on_spot_notice(self, notice: SpotNotice) -> None:
        self.services.termination.notice("spot", ends_in_s=notice.ends_in_s)

    def _on_spot_hint(self, given_at: str) -> None:
        """A recommendation to leave: what there is is saved, and training goes on until there is a notice."""
        services = self.services
        services.events.happened("spot_rebalance_recommended", level="warning", given_at=given_at)
        if services.volume.held_leases():
            try:
                services.save_requests.ask(stop=False)
            except OSError as error:
                log.warning("save_not_asked", error=error.strerror)

    async def _watch(self) -> None:
        """Scan at each hint, and every ``SCAN_S`` without one."""
        services = self.services
        if not services.scanned.is_set():
            await services.scanner.take_over_pins()
        while True:
            await services.scanner.scan()
            services.scanned.set()
            if services.termination.expire():
                services.executor.calm()
                services.events.happened("termination_void", hint="no SIGTERM followed the notice: the pod stays")
            services.termination.look()
            services.save_requests.look()
            if services.phase is Phase.RUNNING:
                services.watch_risk()
            await self._hints.wait(timeout_s=SETTLE_S if services.scanner.unsettled else SCAN_S)

    async def _use_store(self) -> None:
        try:
            await self._use_store_unless_fenced()
        except* Fenced as group:  # at the start; later on a task sees to it
            self._on_fenced(str(_first(group)))

    async def _use_store_unless_fenced(self) -> None:
        """Reach the store, then upload, commit, clean and serve resumes until cancelled."""
        services, settings = self.services, self._settings
        with awaited():
            capabilities, run = await self._open_store()
            prefix_lease = services.lease = self._prefix_lease(run)
            await prefix_lease.wait_for_ending()
        services.capabilities = capabilities
        services.executor.is_away(capabilities.round_trip_s)
        if capabilities.verification is Verification.OFF:
            log.warning("uploads_are_not_verified", hint="CKPT_VERIFY=off: a store that damages bytes is found out at resume")
        await services.scanned.wait()
        is_first = settings.node is not None and settings.node.index == 0
        if is_first and prefix_lease.takes_over_at_once:  # before the resume: no earlier pod commits after it any more
            await prefix_lease.settle()
        is_remote = capabilities.round_trip_s is not None
        services.resume_service.opened(Downloader(self._store, services.volume, services.executor, is_remote=is_remote))
        if settings.resume == "eager" and not services.volume.held_leases():
            services.resume_service.begin_early()
        uploader = Uploader(
            self._upload_context(capabilities, prefix_lease),
            volume=services.volume,
            scanner=services.scanner,
            hints=self._hints,
            skip_superseded=settings.superseded == "skip",
        )
        cleaner = Cleaner(
            settings=settings,
            store=self._store,
            volume=services.volume,
            catalog=services.catalog,
            executor=services.executor,
            resume_service=services.resume_service,
            events=services.events,
            fence=prefix_lease,
        )
        orphans = OrphanUploads(
            self._store,
            services.executor,
            services.volume,
            alone=settings.node is not None and settings.node.count == 1,
            newest_committed_step=lambda: services.catalog.newest_durable_step,
            is_going=lambda: services.termination.going is not None,
        )
        services.make_room = cleaner.make_room
        sharing = Sharing(services.resume_service.quarantine, self._store, services.executor, node=settings.node)
        self._opened.set()
        if is_first and not prefix_lease.takes_over_at_once:  # see that no other job writes below the prefix, for all nodes
            await prefix_lease.settle()
        await _together(
            [
                *([_kept_up("lease", prefix_lease.keep), self._end_when_fenced(prefix_lease)] if is_first else []),
                _kept_up("uploader", uploader.run),
                _kept_up("cleaner", cleaner.run),
                *([_kept_up("retention", cleaner.run_retention)] if settings.keep_store is not None else []),
                # For all nodes; where the markers alone say which node this is, it may be the first.
                *([_kept_up("orphan-uploads", orphans.run)] if is_first or settings.node is None else []),
                _kept_up("quarantine", sharing.run),
            ]
        )

    def _upload_context(self, capabilities: Capabilities, prefix_lease: PrefixLease) -> UploadContext:
        services = self.services
        return UploadContext(
            store=self._store,
            limits=StoreLimits(capabilities),
            executor=services.executor,
            committer=Committer(self._store, services.executor, fence=prefix_lease),
            catalog=services.catalog,
            flush=FlushControl(services.executor, on_plan=services.planned),
            pod=services,
            lease=prefix_lease,
            quarantine=services.resume_service,
        )

    def _prefix_lease(self, run: Run) -> PrefixLease:
        services, settings = self.services, self._settings
        volume = checksum.to_text(checksum.checksum(services.volume.read_state(POD) or services.token.encode()))
        name = settings.pod if settings.pod_is_unique else f"{settings.pod}/{volume[:8]}"
        holder = Holder(
            name=name,
            id=checksum.to_text(checksum.checksum(name.encode())),
            node=settings.node,
            job=settings.job,
            is_of_run=settings.run_id is not None or (settings.job is not None and run.job == settings.job),
            is_unique=settings.pod_is_unique,
        )
        return PrefixLease(self._store, services.executor, run, holder=holder, pod=services.termination)

    async def _end_when_fenced(self, prefix_lease: PrefixLease) -> None:
        await prefix_lease.fenced.wait()
        self._on_fenced(prefix_lease.fenced_by)

    def _on_fenced(self, reason: str) -> None:
        self.services.events.happened("fenced", level="error", reason=reason, hint="the trainer is told to stop")
        self.services.termination.fenced()

    async def _open_store(self) -> tuple[Capabilities, Run]:
        vanished = 0
        while True:
            try:
                capabilities = await self.services.executor.once(self._store.probe)
                run = await self.services.executor.once(
                    claim, self._store, run_id=self._settings.run_id, job=self._settings.job
                )
            except StoreError as error:
                if isinstance(error, NotFound) and vanished < PROBE_TRIES:
                    vanished += 1
                    continue
                if self._settings.verify_access and not error.transient:
                    raise ConfigurationError(str(error)) from None
                self.services.health.failed(error)
                await asyncio.sleep(STORE_AGAIN_S)
            else:
                log.info("store_opened", run_id=run.run_id, verification=capabilities.verification.value)
                return capabilities, run

    async def _until_done(self) -> None:
        services = self.services
        while services.phase is not Phase.DONE:
            phase = await self._next_phase()
            if phase is not services.phase:
                before, services.phase = services.phase, phase
                services.events.happened(
                    "phase_changed", phase=phase.value, before=before.value, left_s=_rounded(services.termination.left_s())
                )
            if phase is not Phase.DONE:
                left_s = services.termination.left_s()
                await self._rest(TICK_S if left_s is None else min(TICK_S, max(0.01, left_s)))

    async def _rest(self, seconds: float) -> None:
        """Return after ``seconds``, or with the next notice."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._noticed.wait()
        self._noticed.clear()

    async def _next_phase(self) -> Phase:
        before, now = self.services.phase, self._situation()
        phase = next_phase(before, now)
        if phase is before or phase not in (Phase.FLUSHING, Phase.DONE) or now.cut_short or now.deadline_passed:
            return phase
        # What the trainer finished with its last breath; nobody is done before it was looked for.
        looked = await self._look_once_more()
        phase = next_phase(before, self._situation())
        return before if phase is Phase.DONE and not looked and not self._is_out_of_time() else phase

    def _is_out_of_time(self) -> bool:
        now = self._situation()
        return now.cut_short or now.deadline_passed

    async def _look_once_more(self) -> bool:
        """Return whether a look at the volume that began now has ended."""
        is_new = self._look is None
        look = self._look or asyncio.create_task(self.services.scanner.scan())
        self._look = look
        left_s = self.services.termination.left_s()
        await asyncio.wait({look}, timeout=LAST_LOOK_S if left_s is None else min(LAST_LOOK_S, max(0.0, left_s)))
        if not look.done():
            return False
        self._look = None
        if (error := look.exception()) is not None:
            log.warning("last_look_failed", error=str(error))
        return is_new and error is None

    def _situation(self) -> Situation:
        services, left_s = self.services, self.services.termination.left_s()
        return Situation(
            ready=self._opened.is_set() and services.scanned.is_set(),
            notice=services.termination.going is not None,
            sigterm=services.termination.sigterms > 0,
            trainer_alive=services.trainer_alive(),
            trainer_succeeded=services.termination.trainer_succeeded(),
            classic=self._settings.mode == "classic",
            everything_durable=services.everything_durable(),
            deadline_passed=left_s is not None and left_s <= 0,
            cut_short=services.termination.sigterms > 1,
            fenced=services.termination.is_fenced,
        )

    async def _finish(self) -> int:
        """Say what is durable and what is not, to everybody who waits or asks later. Returns the exit code."""
        services = self.services
        fenced = services.lease.fenced_by if services.lease is not None and services.termination.is_fenced else None
        why = "a second SIGTERM cut the flush short" if services.termination.sigterms > 1 else "the deadline passed first"
        if fenced is not None:
            why = fenced
        if services.health.trouble is not None:
            why = f"{why}; {services.health.trouble}"
        for tracked in services.catalog.pending():
            planned = services.plan.get(tracked.name) if services.plan else None
            # Where all of it was sent, what was waited for: other nodes. Where it failed or was not begun, why.
            is_said = tracked.state in (State.UPLOADED, State.FINISHED) and tracked.reason is not None
            more = tracked.reason if is_said or planned is None else planned.reason or tracked.reason
            reason = f"{why}: {more}" if more else why
            services.catalog.move(tracked, State.GIVEN_UP, reason=reason, sent_bytes=tracked.sent_bytes)
        written = exit_report.exit_report(
            services.catalog,
            services.termination,
            quarantined=services.resume_service.quarantined,
            unseen=services.unseen(),
            unfinished=services.unfinished(),
            fenced=fenced,
        )
        services.ended.set()
        services.resume_service.close()
        # A thread of its own: those of the event loop may all be inside a volume that hangs.
        writer = ThreadPoolExecutor(1, thread_name_prefix="report")
        writing = asyncio.get_running_loop().run_in_executor(writer, exit_report.write, services.volume, written)
        await asyncio.wait({writing, asyncio.create_task(self._release())}, timeout=REPORT_S)
        writer.shutdown(wait=False)
        return int(written["exit_code"])

    async def _release(self) -> None:
        """Tell later pods that this one has ended."""
        with contextlib.suppress(StoreError):
            if self.services.lease is not None:
                await self.services.lease.release()

    def _on_sigterm(self) -> None:
        # A native sidecar is signalled after the trainer has ended: while it lives it is the sidecar alone that is started
        # again, and training goes on. A notice that came before was for both.
        tell = self._settings.mode == "classic" or not self.services.trainer_alive()
        self.services.termination.sigterm(tell_trainer=tell)

    def _on_notice(self) -> None:
        """React to a notice of any source: the uploads hurry; the volume and the phase are checked at once."""
        self.services.executor.hurry()
        if self.services.lease is not None:
            self.services.lease.wake()
        going = self.services.termination.going
        source = going.source if going else None
        self.services.events.happened("termination_noticed", source=source, left_s=_rounded(self.services.termination.left_s()))
        self._hints.wake()
        self._noticed.set()


_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)


def _on_signals(handler: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in _TOLD_TO_END:
        loop.add_signal_handler(number, handler)
    # Those that came while the process started are handled now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD_TO_END)


async def _kept_up(name: str, service: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run a service for ever: no mistake in one of them is a reason to stop making checkpoints durable."""
    while True:
        try:
            await service()
        except Exception:
            log.exception("service_failed", service=name, again_in_s=SERVICE_AGAIN_S)
        await asyncio.sleep(SERVICE_AGAIN_S)


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


def _listen_unix(place: Place) -> list[socket.socket]:
    try:
        return [listen_unix(place)]
    except OSError as error:  # a volume that cannot hold sockets
        log.warning("no_unix_socket", path=str(place), error=str(error))
        return []


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
