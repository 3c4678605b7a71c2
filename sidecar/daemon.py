"""The running sidecar: starts every part, moves through the phases, and ends with a report.

Who gets which signal when: as a native sidecar SIGTERM arrives after the trainer ended; as a classic one at the same
instant as the trainer's. Both are the same to this program: it goes on until no rank's lease is held and all that is
finished is durable, or the deadline passes. The API answers until the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import structlog

from sidecar import report
from sidecar.api.app import create_app, create_metrics_app
from sidecar.api.server import Server, listen
from sidecar.cleaner import Cleaner
from sidecar.core import checksum
from sidecar.core.lifecycle import Phase, Situation, next_phase
from sidecar.core.spot import SpotNotice
from sidecar.core.states import State
from sidecar.core.tenancy import Run
from sidecar.errors import ConfigurationError, NotFound, SidecarError, StoreError
from sidecar.resume.downloader import Downloader
from sidecar.run_identity import Tenancy, claim
from sidecar.runtime import Runtime
from sidecar.scanner import SETTLE_S
from sidecar.settings import Settings
from sidecar.spot import SpotWatch
from sidecar.store.protocol import Capabilities, Store, Verification
from sidecar.termination import POD
from sidecar.transfer import awaited
from sidecar.upload.uploader import Uploader
from sidecar.volume.files import publish
from sidecar.volume.lock import hold_volume
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


class Daemon:
    """One life of the sidecar."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.runtime = Runtime(settings, store_url=store.url)
        self._hints = Hints(settings.dir)
        self._opened = asyncio.Event()
        self._look: asyncio.Task[None] | None = None
        """The last look at the volume. On a volume that hangs it is left behind."""

    async def run(self) -> int:
        """Run until told to end. Returns the exit code.

        Raises:
            ConfigurationError: The volume, the store or the port cannot be used.
        """
        runtime = self.runtime
        if not await self._take_volume():
            return report.EXIT_DONE
        _on_signals(self._on_sigterm)
        servers = self._servers()
        for setting in self._settings.without_effect():
            log.warning("setting_without_effect", setting=setting, hint="this version does not do it yet")
        log.info("sidecar_started", store=self._store.url, dir=str(self._settings.dir), api_port=self._settings.api_port)
        services = asyncio.create_task(_together(self._services()))
        api = asyncio.create_task(_together([server.serve() for server in servers]))
        done = asyncio.create_task(self._until_done())
        try:
            await asyncio.wait({services, api, done}, return_when=asyncio.FIRST_COMPLETED)
            for task in (services, api, done):
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
            for task in (services, api, done):
                task.cancel()
            runtime.transfers.close()
            self._hints.stop()
            with contextlib.suppress(OSError):
                (self._settings.dir / API_SOCKET).unlink()
        return code

    async def _end_calls(self, servers: list[Server], api: asyncio.Task[None]) -> None:
        # The margin before SIGKILL is half a second where the grace period is short: nobody is waited for longer.
        for server in servers:
            server.stop()
        await asyncio.wait({api}, timeout=CALLS_END_S)

    async def _take_volume(self) -> bool:
        """Prepare the volume, once it is ours alone. Returns false if we were told to end first."""
        told_to_end = asyncio.Event()
        _on_signals(told_to_end.set)
        try:
            self.runtime.volume.prepare()
            if not await hold_volume(self._settings.dir, told_to_end=told_to_end):
                return False
            publish(self._settings.dir / TOKEN, self.runtime.token.encode(), mode=0o640)
        except OSError as error:
            raise ConfigurationError(
                f"CKPT_DIR={self._settings.dir}: {error.strerror}: "
                f"mount the volume that the trainer writes to, writable for user {os.geteuid()}"
            ) from None
        self.runtime.termination.begin(self._settings.pod)
        return True

    def _servers(self) -> list[Server]:
        settings = self._settings
        sockets = [listen("127.0.0.1", settings.api_port, setting="CKPT_API_PORT")]
        sockets += _listen_unix(settings)
        servers = [Server(create_app(self.runtime), sockets)]
        if settings.metrics_bind:
            host, _, port = settings.metrics_bind.rpartition(":")
            metrics = listen(host.strip("[]") or "0.0.0.0", _port(port), setting="CKPT_METRICS_BIND")  # noqa: S104 - asked for
            servers.append(Server(create_metrics_app(self.runtime), [metrics]))
        return servers

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        self._hints.start()
        services = [_kept_up("watch", self._watch), self._use_store()]
        if self._settings.spot != "off":
            spot = SpotWatch(
                self._settings.spot, self._settings.spot_endpoint, on_notice=self._on_spot_notice, on_hint=self._on_spot_hint
            )
            services.append(_kept_up("spot", spot.run))
        return services

    def _on_spot_notice(self, notice: SpotNotice) -> None:
        if self.runtime.termination.notice("spot", ends_in_s=notice.ends_in_s):
            self._told()

    def _on_spot_hint(self, given_at: str) -> None:
        """A recommendation to leave: what there is is saved, and training goes on until there is a notice."""
        runtime = self.runtime
        runtime.events.happened("spot_rebalance_recommended", level="warning", given_at=given_at)
        if runtime.volume.held_leases():
            try:
                runtime.saves.ask(stop=False)
            except OSError as error:
                log.warning("save_not_asked", error=error.strerror)

    async def _watch(self) -> None:
        """Scan at each hint, and every ``SCAN_S`` without one."""
        runtime = self.runtime
        if not runtime.scanned.is_set():
            await runtime.scanner.take_over_pins()
        while True:
            await runtime.scanner.scan()
            runtime.scanned.set()
            if runtime.termination.expire():
                runtime.transfers.calm()
                runtime.events.happened("termination_void", hint="no SIGTERM followed the notice: the pod stays")
            if runtime.termination.look():
                self._told()
            runtime.saves.look()
            if runtime.phase is Phase.RUNNING:
                runtime.watch_risk()
            await self._hints.wait(timeout_s=SETTLE_S if runtime.scanner.unsettled else SCAN_S)

    async def _use_store(self) -> None:
        """Reach the store, then upload, commit, clean and serve resumes until cancelled."""
        runtime, settings = self.runtime, self._settings
        with awaited():
            capabilities, run = await self._open_store()
        runtime.capabilities = capabilities
        runtime.transfers.is_away(capabilities.round_trip_s)
        if capabilities.verification is Verification.OFF:
            log.warning("uploads_are_not_verified", hint="CKPT_VERIFY=off: a store that damages bytes is found out at resume")
        await runtime.scanned.wait()
        runtime.resuming.opened(Downloader(self._store, runtime.volume, runtime.transfers))
        if settings.resume == "eager" and not runtime.volume.held_leases():
            runtime.resuming.begin_early()
        tenancy = self._tenancy(run)
        uploader = Uploader(
            store=self._store,
            capabilities=capabilities,
            volume=runtime.volume,
            catalog=runtime.catalog,
            transfers=runtime.transfers,
            hints=self._hints,
            skip_superseded=settings.superseded == "skip",
            examine_again=runtime.scanner.examine_again,
            attempt=runtime.attempt,
            left_s=runtime.termination.left_s,
            trainer_alive=runtime.trainer_alive,
            on_plan=runtime.planned,
            alone=settings.node is not None and settings.node.count == 1,
            is_quarantined=lambda name: name in runtime.resuming.quarantined,
            objection=tenancy.objection,
        )
        cleaner = Cleaner(
            settings=settings,
            store=self._store,
            volume=runtime.volume,
            catalog=runtime.catalog,
            transfers=runtime.transfers,
            resuming=runtime.resuming,
            events=runtime.events,
        )
        runtime.make_room = cleaner.make_room
        self._opened.set()
        is_first = settings.node is not None and settings.node.index == 0
        if is_first:  # see that no other job writes below the prefix at this time, for all nodes
            await tenancy.settle()
        await _together(
            [
                *([_kept_up("tenancy", tenancy.keep)] if is_first else []),
                _kept_up("uploader", uploader.run),
                _kept_up("cleaner", cleaner.run),
            ]
        )

    def _tenancy(self, run: Run) -> Tenancy:
        runtime, settings = self.runtime, self._settings
        me = checksum.to_text(checksum.checksum(runtime.volume.read_small(POD) or runtime.token.encode()))
        return Tenancy(
            self._store,
            runtime.transfers,
            run,
            me=f"{settings.pod}/{me[:8]}",
            node=settings.node,
            job=settings.job,
            going=lambda: runtime.termination.going is not None,
            attempt=lambda: trainer.attempt if (trainer := runtime.termination.trainer()) else None,
        )

    async def _open_store(self) -> tuple[Capabilities, Run]:
        vanished = 0
        while True:
            try:
                capabilities = await self.runtime.transfers.once(self._store.probe)
                run = await self.runtime.transfers.once(
                    claim, self._store, run_id=self._settings.run_id, job=self._settings.job
                )
            except StoreError as error:
                if isinstance(error, NotFound) and vanished < PROBE_TRIES:
                    vanished += 1
                    continue
                if self._settings.verify_access and not error.transient:
                    raise ConfigurationError(str(error)) from None
                self.runtime.health.failed(error)
                await asyncio.sleep(STORE_AGAIN_S)
            else:
                log.info("store_opened", run_id=run.run_id, verification=capabilities.verification.value)
                return capabilities, run

    async def _until_done(self) -> None:
        runtime = self.runtime
        while runtime.phase is not Phase.DONE:
            phase = await self._next_phase()
            if phase is not runtime.phase:
                before, runtime.phase = runtime.phase, phase
                runtime.events.happened(
                    "phase_changed", phase=phase.value, before=before.value, left_s=_rounded(runtime.termination.left_s())
                )
            if phase is not Phase.DONE:
                left_s = runtime.termination.left_s()
                await asyncio.sleep(TICK_S if left_s is None else min(TICK_S, max(0.01, left_s)))

    async def _next_phase(self) -> Phase:
        before, now = self.runtime.phase, self._situation()
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
        look = self._look or asyncio.create_task(self.runtime.scanner.scan())
        self._look = look
        left_s = self.runtime.termination.left_s()
        await asyncio.wait({look}, timeout=LAST_LOOK_S if left_s is None else min(LAST_LOOK_S, max(0.0, left_s)))
        if not look.done():
            return False
        self._look = None
        if (error := look.exception()) is not None:
            log.warning("last_look_failed", error=str(error))
        return is_new and error is None

    def _situation(self) -> Situation:
        runtime, left_s = self.runtime, self.runtime.termination.left_s()
        return Situation(
            ready=self._opened.is_set() and runtime.scanned.is_set(),
            notice=runtime.termination.going is not None,
            sigterm=runtime.termination.sigterms > 0,
            trainer_alive=runtime.trainer_alive(),
            trainer_succeeded=runtime.termination.trainer_succeeded(),
            classic=self._settings.mode == "classic",
            everything_durable=runtime.everything_durable(),
            deadline_passed=left_s is not None and left_s <= 0,
            cut_short=runtime.termination.sigterms > 1,
        )

    async def _finish(self) -> int:
        """Say what is durable and what is not, to everybody who waits or asks later. Returns the exit code."""
        runtime = self.runtime
        why = "a second SIGTERM cut the flush short" if runtime.termination.sigterms > 1 else "the deadline passed first"
        if runtime.health.trouble is not None:
            why = f"{why}; {runtime.health.trouble}"
        for tracked in runtime.catalog.pending():
            planned = runtime.plan.get(tracked.name) if runtime.plan else None
            # Where all of it was sent, what was waited for: other nodes. Where nothing was, why not.
            more = (planned.reason if planned and tracked.state is not State.UPLOADED else None) or tracked.reason
            reason = f"{why}: {more}" if more else why
            runtime.catalog.move(tracked, State.GIVEN_UP, reason=reason, sent_bytes=tracked.sent_bytes)
        written = report.exit_report(
            runtime.catalog,
            runtime.termination,
            quarantined=runtime.resuming.quarantined,
            unseen=runtime.unseen(),
            unfinished=runtime.unfinished(),
        )
        runtime.ended.set()
        runtime.resuming.close()
        # A thread of its own: those of the event loop may all be inside a volume that hangs.
        writer = ThreadPoolExecutor(1, thread_name_prefix="report")
        writing = asyncio.get_running_loop().run_in_executor(writer, report.write, runtime.volume, written)
        await asyncio.wait({writing}, timeout=REPORT_S)
        writer.shutdown(wait=False)
        return int(written["exit_code"])

    def _on_sigterm(self) -> None:
        # A native sidecar is signalled after the trainer has ended: while it lives it is the sidecar alone that is started
        # again, and training goes on. A notice that came before was for both.
        tell = self._settings.mode == "classic" or not self.runtime.trainer_alive()
        self.runtime.termination.sigterm(tell_trainer=tell)
        self._told()

    def _told(self) -> None:
        self.runtime.transfers.hurry()
        going = self.runtime.termination.going
        source = going.source if going else None
        self.runtime.events.happened("termination_noticed", source=source, left_s=_rounded(self.runtime.termination.left_s()))
        self._hints.wake()


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


def _listen_unix(settings: Settings) -> list[socket.socket]:
    path = settings.dir / API_SOCKET
    with contextlib.suppress(OSError):
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o660)
    except OSError as error:  # a path longer than 107 bytes, or a volume that cannot hold sockets
        log.warning("no_unix_socket", path=str(path), error=str(error))
        listening.close()
        return []
    listening.listen(64)
    return [listening]


def _port(text: str) -> int:
    if not text.isdigit() or not 0 <= int(text) < 65536:
        raise ConfigurationError(f"CKPT_METRICS_BIND must be host:port, such as 0.0.0.0:9471, not a port {text!r}")
    return int(text)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
