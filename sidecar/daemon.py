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
from collections.abc import Coroutine
from typing import Any

import structlog

from sidecar import report
from sidecar.api.app import create_app, create_metrics_app
from sidecar.api.server import Server, listen
from sidecar.cleaner import Cleaner
from sidecar.core.lifecycle import Phase, Situation, next_phase
from sidecar.core.states import State
from sidecar.downloader import Downloader
from sidecar.errors import ConfigurationError, SidecarError, StoreError
from sidecar.run_identity import claim
from sidecar.runtime import Runtime
from sidecar.scanner import SETTLE_S
from sidecar.settings import Settings
from sidecar.store.protocol import Capabilities, Store, Verification
from sidecar.uploader import Uploader
from sidecar.volume import publish
from sidecar.watch import Hints
from trainer_hook.contract import API_SOCKET, TERMINATING, TOKEN

log = structlog.get_logger()

SCAN_S = 1.0
"""Longest time between two scans of the volume."""
TICK_S = 0.2
"""How often the phase is decided again while the pod is going."""
STORE_AGAIN_S = 5.0


class Daemon:
    """One life of the sidecar."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self.runtime = Runtime(settings, store_url=store.url)
        self._hints = Hints(settings.dir)
        self._opened = asyncio.Event()
        self._scanned = asyncio.Event()
        self._owned = asyncio.Event()
        """This sidecar is the only one of its volume."""

    async def run(self) -> int:
        """Run until told to end. Returns the exit code.

        Raises:
            ConfigurationError: The volume, the store or the port cannot be used.
        """
        runtime = self.runtime
        self._prepare_volume()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_sigterm)
        servers = self._servers()
        for setting in self._settings.without_effect():
            log.warning("setting_without_effect", setting=setting, hint="this version does not do it yet")
        log.info("sidecar_started", store=self._store.url, dir=str(self._settings.dir), api_port=self._settings.api_port)
        try:
            async with asyncio.TaskGroup() as services:
                tasks = [services.create_task(work) for work in self._services()]
                tasks += [services.create_task(server.serve()) for server in servers]
                await self._until_done()
                code = self._finish()
                for server in servers:
                    server.stop()
                for task in tasks[: len(tasks) - len(servers)]:
                    task.cancel()
        except* SidecarError as group:
            raise _first(group) from None
        finally:
            runtime.transfers.close()
            self._hints.stop()
            with contextlib.suppress(OSError):
                if self._owned.is_set():
                    (self._settings.dir / API_SOCKET).unlink()
        return code

    def _prepare_volume(self) -> None:
        try:
            self.runtime.volume.prepare()
            if self.runtime.volume.lock():
                self._use_volume()
        except OSError as error:
            raise ConfigurationError(
                f"CKPT_DIR={self._settings.dir}: {error.strerror}: "
                f"mount the volume that the trainer writes to, writable for user {os.geteuid()}"
            ) from None
        self.runtime.scanner.enabled = self._owned.is_set()

    def _use_volume(self) -> None:
        publish(self._settings.dir / TOKEN, self.runtime.token.encode(), mode=0o640)
        self.runtime.termination.clear_stale()
        self._owned.set()

    async def _wait_for_volume(self) -> None:
        """Wait until the sidecar that has the volume ends: at a pod's replacement it still flushes."""
        if self._owned.is_set():
            return
        runtime = self.runtime
        runtime.health.trouble = "another sidecar still uses this volume; it is waited for"
        runtime.events.happened("volume_waited_for", level="warning", hint="the pod that is being replaced still flushes")
        while not runtime.volume.lock():  # noqa: ASYNC110 - nobody tells when a lock is freed
            await asyncio.sleep(TICK_S)
        if runtime.termination.going is None:  # the notice of the one that was here is not ours
            (self._settings.dir / TERMINATING).unlink(missing_ok=True)
        self._use_volume()
        runtime.health.trouble = None
        runtime.scanner.enabled = True
        runtime.events.happened("volume_taken_over")

    def _servers(self) -> list[Server]:
        settings = self._settings
        sockets = [listen("127.0.0.1", settings.api_port, setting="CKPT_API_PORT")]
        if self._owned.is_set():  # its name on the volume belongs to whoever has the volume
            sockets += _listen_unix(settings)
        servers = [Server(create_app(self.runtime), sockets)]
        if settings.metrics_bind:
            host, _, port = settings.metrics_bind.rpartition(":")
            metrics = listen(host.strip("[]") or "0.0.0.0", _port(port), setting="CKPT_METRICS_BIND")  # noqa: S104 - asked for
            servers.append(Server(create_metrics_app(self.runtime), [metrics]))
        return servers

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch(), self._use_store(), self._serve_socket_later(self._owned.is_set())]

    async def _serve_socket_later(self, is_served: bool) -> None:
        if not is_served:
            await self._owned.wait()
            if sockets := _listen_unix(self._settings):
                await Server(create_app(self.runtime), sockets).serve()

    async def _watch(self) -> None:
        """Scan at each hint, and every ``SCAN_S`` without one."""
        runtime = self.runtime
        await self._wait_for_volume()
        self._hints.start()
        await runtime.scanner.take_over_pins()
        while True:
            await runtime.scanner.scan()
            self._scanned.set()
            if runtime.termination.expire():
                runtime.events.happened("termination_void", hint="no SIGTERM followed the notice: the pod stays")
            if runtime.termination.look():
                self._told()
            await self._hints.wait(timeout_s=SETTLE_S if runtime.scanner.unsettled else SCAN_S)

    async def _use_store(self) -> None:
        """Reach the store, then upload, commit, clean and serve resumes until cancelled."""
        runtime, settings = self.runtime, self._settings
        await self._owned.wait()
        capabilities = await self._open_store()
        runtime.capabilities = capabilities
        if capabilities.verification is Verification.OFF:
            log.warning("uploads_are_not_verified", hint="CKPT_VERIFY=off: a store that damages bytes is found out at resume")
        await self._scanned.wait()
        runtime.resuming.opened(Downloader(self._store, runtime.volume, runtime.transfers))
        if settings.resume == "eager" and not runtime.volume.held_leases():
            runtime.resuming.begin_early()
        uploader = Uploader(
            store=self._store,
            capabilities=capabilities,
            volume=runtime.volume,
            catalog=runtime.catalog,
            transfers=runtime.transfers,
            hints=self._hints,
            part_bytes=settings.part_size,
            skip_superseded=settings.superseded == "skip",
            examine_again=runtime.scanner.examine_again,
            attempt=runtime.attempt,
            going=lambda: runtime.termination.going is not None,
            is_quarantined=lambda name: name in runtime.resuming.quarantined,
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
        self._opened.set()
        async with asyncio.TaskGroup() as workers:
            workers.create_task(uploader.run())
            workers.create_task(cleaner.run())

    async def _open_store(self) -> Capabilities:
        while True:
            try:
                capabilities = await self.runtime.transfers.once(self._store.probe)
                run_id = await self.runtime.transfers.once(claim, self._store, run_id=self._settings.run_id)
            except StoreError as error:
                if self._settings.verify_access and not error.transient:
                    raise ConfigurationError(str(error)) from None
                self.runtime.health.failed(error)
                await asyncio.sleep(STORE_AGAIN_S)
            else:
                log.info("store_opened", run_id=run_id, verification=capabilities.verification.value)
                return capabilities

    async def _until_done(self) -> None:
        runtime = self.runtime
        while runtime.phase is not Phase.DONE:
            phase = next_phase(runtime.phase, self._situation())
            if phase is not runtime.phase:
                if phase is Phase.FLUSHING or phase is Phase.DONE:
                    await runtime.scanner.scan()  # what the trainer finished with its last breath
                    phase = next_phase(runtime.phase, self._situation())
                before, runtime.phase = runtime.phase, phase
                runtime.events.happened(
                    "phase_changed", phase=phase.value, before=before.value, left_s=_rounded(runtime.termination.left_s())
                )
            await asyncio.sleep(TICK_S)

    def _situation(self) -> Situation:
        runtime, left_s = self.runtime, self.runtime.termination.left_s()
        trainer = runtime.termination.trainer()
        return Situation(
            ready=self._opened.is_set() and self._scanned.is_set(),
            notice=runtime.termination.going is not None,
            sigterm=runtime.termination.sigterms > 0,
            trainer_alive=runtime.trainer_alive(),
            trainer_succeeded=trainer is not None and trainer.state == "succeeded",
            classic=self._settings.mode == "classic",
            everything_durable=runtime.everything_durable(),
            deadline_passed=left_s is not None and left_s <= 0,
            cut_short=runtime.termination.sigterms > 1,
        )

    def _finish(self) -> int:
        runtime = self.runtime
        why = "a second SIGTERM cut the flush short" if runtime.termination.sigterms > 1 else "the deadline passed first"
        if runtime.health.trouble is not None:
            why = f"{why}; {runtime.health.trouble}"
        for tracked in runtime.catalog.pending():
            if tracked.state is not State.GIVEN_UP:
                runtime.catalog.move(tracked, State.GIVEN_UP, reason=why, sent_bytes=tracked.sent_bytes)
        written = report.exit_report(runtime.catalog, runtime.termination, quarantined=runtime.resuming.quarantined)
        if self._owned.is_set():
            report.write(runtime.volume, written)
        runtime.resuming.close()
        return int(written["exit_code"])

    def _on_sigterm(self) -> None:
        self.runtime.termination.sigterm()
        self._told()

    def _told(self) -> None:
        self.runtime.transfers.hurry()
        going = self.runtime.termination.going
        source = going.source if going else None
        self.runtime.events.happened("termination_noticed", source=source, left_s=_rounded(self.runtime.termination.left_s()))
        self._hints.wake()


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
