"""Daemon: starts all services, reacts to termination notices, and ends with a report.

Signals: a native sidecar gets SIGTERM after the trainer has ended, a classic one at the same time as the trainer. Both run
until no rank holds a lease and every finished checkpoint is durable, or until the deadline. The API answers until the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from sidecar.api.app import create_app, create_metrics_app
from sidecar.api.server import Server, listen
from sidecar.catalog.catalog import Tracked
from sidecar.catalog.events import rounded
from sidecar.catalog.scanner import SETTLE_S
from sidecar.core.lifecycle.phases import Phase, longest_commit_check_s, longest_release_s
from sidecar.core.lifecycle.states import State
from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.core.schedule.order import upload_order
from sidecar.daemon import exit_report, tracing
from sidecar.daemon.phase_control import PhaseControl
from sidecar.daemon.services import Services
from sidecar.daemon.settings import Settings
from sidecar.daemon.store_services import use_store
from sidecar.errors import ConfigurationError, SidecarError, Stopped, StoreError
from sidecar.lifecycle.spot import SpotWatch
from sidecar.lifecycle.trainer_saves import TrainerSaves
from sidecar.repository.documents import Documents
from sidecar.store.protocol import Store
from sidecar.tasks import run_forever, run_together
from sidecar.thread_pool import ThreadPool
from sidecar.volume.lock import hold_volume
from sidecar.volume.opener import Place
from sidecar.volume.retry import retried_until
from sidecar.volume.sockets import listen_unix
from trainer_hook.contract import API_SOCKET, LOCK

log = structlog.get_logger()

SCAN_S = 1.0
"""Longest time between two scans of the volume."""
MOST_NAMED = 5
"""Most pending checkpoints that one line of the log names."""
CALLS_END_S = 0.2
"""Seconds for which answers in progress may delay the exit. The margin before SIGKILL may be half a second."""
_JOURNALS_HINT = (
    "the trainer can write to them and CKPT_STATE_DIR is set: removed; their content is determined again, or sent again"
)


class Daemon:
    """The sidecar process."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self.services = Services(settings, store)
        self.services.executor.on_hurry = store.hurry
        self.services.termination.observe(self._on_notice)
        self._tracing = tracing.begin(os.environ, pod=settings.pod, node=settings.node)
        if self._tracing is not None:
            self.services.events.observe(self._tracing.happened)
        self._phase_control = PhaseControl(self.services)
        self._trainer_saves = TrainerSaves(self.services.pod, self.services.events)
        self._is_announced = False
        """The log says that the pod is terminating."""

    async def run(self) -> int:
        """Run until the phase is done. Returns the exit code.

        Raises:
            ConfigurationError: The volume, the store or the port cannot be used.
        """
        services = self.services
        asyncio.get_running_loop().set_default_executor(ThreadPool(None, "volume"))
        told_to_end = asyncio.Event()
        _on_signals(told_to_end.set)
        if (no_volume := await self._take_volume(told_to_end)) is not None:
            return exit_report.ended_without_volume(services.volume, no_volume)
        _on_signals(self._on_sigterm)
        if told_to_end.is_set():  # between two tries to use the volume
            self._on_sigterm()
        servers = self._servers()
        gc.freeze()  # collections skip the objects of imports, which live as long as the process
        gc.enable()
        log.info("sidecar_started", store=services.store.url, dir=str(self._settings.dir), api_port=self._settings.api_port)
        work = asyncio.create_task(run_together(self._tasks()))
        api = asyncio.create_task(run_together([server.serve() for server in servers]))
        done = asyncio.create_task(self._phase_control.run())
        try:
            await asyncio.wait({work, api, done}, return_when=asyncio.FIRST_COMPLETED)
            for task in (work, api, done):
                if task.done():
                    task.result()
            code = await self._finish()
            await _end_calls(servers, api)
        except SidecarError:
            raise
        except Exception:
            log.exception("sidecar_failed")
            await self._finish()
            raise
        finally:
            for task in (work, api, done):
                task.cancel()
            services.executor.close()
            services.hints.stop()
            with contextlib.suppress(OSError):
                (services.volume / API_SOCKET).remove()
        return code

    async def _take_volume(self, told_to_end: asyncio.Event) -> str | None:
        """Lock and prepare the volume. Returns why it could not be used until ``told_to_end`` was set; ``None``: it is."""
        volume = self.services.volume
        try:
            volume.prepare_state()
        except OSError as error:
            raise ConfigurationError(
                f"CKPT_STATE_DIR={self._settings.state_dir}: {error.strerror}: mount an emptyDir there, "
                f"into the sidecar alone, writable for user {os.geteuid()}"
            ) from None
        try:
            await retried_until(told_to_end, self._prepare_volume)
            if not await retried_until(told_to_end, hold_volume, volume / LOCK, told_to_end=told_to_end):
                return "another sidecar used the volume until the end"
            self.services.token_file.publish()
            self._install_hook()
            await retried_until(told_to_end, self._begin_run)
        except OSError as error:
            if told_to_end.is_set():
                return f"{error.filename or self._settings.dir}: {error.strerror}: the volume failed until the end"
            raise ConfigurationError(_no_volume(self._settings, error)) from None
        return None

    async def _prepare_volume(self) -> None:
        self.services.volume.prepare()

    async def _begin_run(self) -> None:
        settings = self._settings
        if journals := self.services.volume.forget_journals_of_trainer():
            log.warning("journals_not_believed", journals=len(journals), hint=_JOURNALS_HINT)
        self.services.pod.begin(VolumeRun(self.services.store.url, settings.run_id or settings.job))

    def _install_hook(self) -> None:
        """Copy the hook onto the volume if ``CKPT_INSTALL_HOOK`` is set. In native pods the trainer starts after the API.

        While a training process is alive, an installed version stays: all processes of one training use the same version. It
        also stays on a full volume, because the sidecar can make room there only after its start.
        """
        if (folder := self._settings.install_hook) is None:
            return
        from sidecar.volume.hook_install import NotInstalled, install_with_room

        is_used = bool(self.services.volume.held_leases())
        try:
            done = install_with_room(folder, keeps_other=is_used)
        except NotInstalled as error:
            if not is_used:
                raise ConfigurationError(f"CKPT_INSTALL_HOOK: {error}") from None
            log.warning("hook_not_installed", error=str(error), hint="the training that runs has it already")
        else:
            log.info("hook_installed", folder=str(folder), version=done.version, is_new=done.is_new)

    def _servers(self) -> list[Server]:
        settings = self._settings
        sockets = [listen("127.0.0.1", settings.api_port, setting="CKPT_API_PORT")]
        sockets += _listen_unix(self.services.volume / API_SOCKET)
        servers = [Server(create_app(self.services), sockets, durations=self.services.durations)]
        if settings.metrics_bind:
            host, port = settings.metrics_bind
            metrics = listen(host, port, setting="CKPT_METRICS_BIND")
            servers.append(
                Server(create_metrics_app(self.services), [metrics], any_host=True, durations=self.services.durations)
            )
        return servers

    def _tasks(self) -> list[Coroutine[Any, Any, None]]:
        services, settings = self.services, self._settings
        services.hints.start()
        # The volume needs its space also while the store is away.
        tasks = [run_forever("watch", self._watch), run_forever("cleaner", services.volume_cleaner.run), use_store(services)]
        if services.token_file.is_late:
            tasks.append(run_forever("token", services.token_file.run))
        if settings.spot != "off":
            spot = SpotWatch(
                settings.spot,
                settings.spot_endpoint,
                termination=services.termination,
                save_requests=services.save_requests,
                events=services.events,
            )
            tasks.append(run_forever("spot", spot.run))
        return tasks

    async def _watch(self) -> None:
        """Scan at each hint, and every ``SCAN_S`` without one."""
        services = self.services
        while not services.inventory.scanned.is_set() and not await services.scanner.take_over_pins():
            await services.hints.wait(timeout_s=SCAN_S)
        while True:
            await services.scanner.scan()
            services.inventory.scanned.set()
            services.token_file.keep()
            if services.termination.expire():
                services.executor.calm()
                self._is_announced = False
                services.events.happened("termination_void", hint="no SIGTERM followed the notice: the pod stays")
            services.termination.poll_notice()
            services.save_requests.update()
            self._trainer_saves.update()
            services.risk_monitor.observe()
            waiting = [w.name for w in upload_order(tracked.waiting for tracked in services.catalog.pending())]
            services.health.report(pending=len(waiting), next=waiting[:MOST_NAMED])
            if services.state.phase is Phase.RUNNING:
                services.risk_monitor.update()
            await services.hints.wait(timeout_s=SETTLE_S if services.scanner.unsettled else SCAN_S)

    def _on_sigterm(self) -> None:
        # A native sidecar gets SIGTERM after the trainer has ended. If the trainer is alive, the kubelet restarts the sidecar
        # alone, and training goes on. A notice before this signal has told the trainer already.
        tell = self._settings.mode == "classic" or not self.services.pod.trainer_alive()
        self.services.termination.sigterm(tell_trainer=tell)

    def _on_notice(self) -> None:
        """React to a termination notice: requests are hedged earlier; the volume and the phase are checked at once."""
        services, notice = self.services, self.services.termination.current_notice
        services.executor.hurry()
        left_s = rounded(services.termination.deadline.left_s())
        if self._is_announced:  # a second notice, or SIGTERM after one: the clock runs since the first
            services.events.happened("termination_confirmed", sigterms=services.termination.sigterms, left_s=left_s)
        else:
            services.events.happened("termination_noticed", source=notice.source if notice else None, left_s=left_s)
        self._is_announced = True
        services.hints.wake()
        services.renewal.wake()
        self._phase_control.decide_now()

    async def _finish(self) -> int:
        """Give up the checkpoints that are not durable, and write the report. Returns the exit code."""
        services = self.services
        await self._record_commits_of_other_nodes()
        self._give_up_pending()
        report = exit_report.exit_report(
            services.catalog,
            services.termination,
            bad=services.quarantine.quarantined,
            unseen=services.inventory.unseen(),
            unfinished=services.inventory.unfinished(trainer_alive=services.pod.trainer_alive()),
            had_hook=services.pod.trainer() is not None,
        )
        services.state.ended.set()
        services.resume_service.close()
        release_s = longest_release_s(self._kill_in_s())
        ends = [exit_report.write_in_time(services.volume, report), self._release(within_s=release_s)]
        if self._tracing is not None:
            ends.append(self._tracing.end(within_s=release_s))
        await asyncio.gather(*ends)
        return int(report["exit_code"])

    def _kill_in_s(self) -> float | None:
        """Return the seconds that the end may take: 0 after a second SIGTERM, which asks for it at once; ``None``: unknown."""
        termination = self.services.termination
        return 0.0 if termination.sigterms > 1 else termination.deadline.kill_in_s()

    async def _release(self, *, within_s: float) -> None:
        """Release the prefix once deletions in progress have ended: without the lease they would stop halfway."""
        began_s = time.monotonic()
        if (cleaner := self.services.store_cleaner) is not None:
            await cleaner.end(within_s=within_s / 2)
        await self.services.renewal.release_within(within_s - (time.monotonic() - began_s))

    async def _record_commits_of_other_nodes(self) -> None:
        """Record pending checkpoints as durable if other nodes have committed them: this node may not have polled since."""
        services, termination = self.services, self.services.termination
        within_s = longest_commit_check_s(self._kill_in_s())
        pending = [t for t in services.catalog.pending() if t.checkpoint and t.checkpoint.node.count > 1]
        if not pending or not within_s or termination.fenced_by is not None or not services.state.store_opened.is_set():
            return
        documents = Documents(services.store, services.executor)

        async def check(tracked: Tracked) -> None:
            with contextlib.suppress(StoreError, Stopped):  # a commit that cannot be read: the others are still checked
                found = tracked.checkpoint is not None and await documents.is_committed(tracked.checkpoint)
                if found and services.catalog.is_current(tracked):  # uploads go on meanwhile
                    services.catalog.durable(tracked, at_s=time.time())

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*map(check, pending))

    def _give_up_pending(self) -> None:
        services = self.services
        termination = services.termination
        why = "a second SIGTERM cut the flush short" if termination.sigterms > 1 else "the deadline passed first"
        if termination.fenced_by is not None:
            why = termination.fenced_by
        elif services.health.trouble is not None:
            why = f"{why}; {services.health.trouble}"
        for tracked in services.catalog.pending():
            planned = services.flush.plan.get(tracked.name) if services.flush.plan else None
            # If uploaded, it waited for other nodes; if finished, it failed or was not started: its own reason is the cause.
            has_reason = tracked.state in (State.UPLOADED, State.FINISHED) and tracked.reason is not None
            more = tracked.reason if has_reason or planned is None else planned.reason or tracked.reason
            reason = f"{why}: {more}" if more else why
            services.catalog.move(tracked, State.GIVEN_UP, reason=reason, sent_bytes=tracked.sent_bytes)


_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _no_volume(settings: Settings, error: OSError) -> str:
    where = f"CKPT_DIR={settings.dir}" + ("" if "dir" in settings.model_fields_set else " (the default)")
    if error.filename not in (None, str(settings.dir)):
        where += f": {error.filename}"
    return f"{where}: {error.strerror}: mount the volume that the trainer writes to, writable for user {os.geteuid()}"


def _on_signals(handler: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in _END_SIGNALS:
        loop.add_signal_handler(number, handler)
    # Signals were blocked since the start of the process; pending ones are handled now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)


def _listen_unix(place: Place) -> list[socket.socket]:
    try:
        return [listen_unix(place)]
    except OSError as error:  # a volume that cannot hold sockets
        log.warning("no_unix_socket", path=str(place), error=str(error))
        return []


async def _end_calls(servers: list[Server], api: asyncio.Task[None]) -> None:
    for server in servers:
        server.stop()
    await asyncio.wait({api}, timeout=CALLS_END_S)
