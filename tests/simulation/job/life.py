"""One life of a pod's sidecar: the production daemon on simulated time."""

from __future__ import annotations

import traceback
from contextvars import Context, copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidecar.core.lifecycle.states import State
from sidecar.daemon.daemon import Daemon
from sidecar.errors import ConfigurationError
from sidecar.tasks import task_group
from sidecar.volume.retry import retried
from sidecar.volume.watch import Hints
from tests.simulation.job import reader
from tests.simulation.job.loop import Process
from tests.simulation.job.network import PodStore

if TYPE_CHECKING:
    from tests.simulation.job.pods import Pod


class SimulatedHints(Hints):
    """Told by the simulated trainer instead of by the kernel."""

    def start(self) -> None:
        """There is no inotify on simulated time."""

    def closed_after_writing(self, path: Path, at_s: float) -> None:
        self._closed[str(path)] = at_s


class Life(Process):
    """One life of a pod's sidecar: the production ``Daemon``, without its sockets and signals."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(f"{pod.name}#{pod.lives}")
        self.pod = pod
        self.keep_store, self.node = pod.choices.keep_store, pod.node
        self.context = Context()
        world = pod.world
        store = PodStore(world, self, pod.store, cut_off=pod.cut_off)
        self.context.run(self._make, store)
        self.exit_code: int | None = None
        self._said: set[tuple[str, str]] = set()
        world.loop.spawn(self, self._live())

    def _make(self, store: PodStore) -> None:
        self.daemon = Daemon(self.pod.settings(), store)
        self.services = self.daemon.services
        self.hints = self.services.hints = SimulatedHints(self.services.volume)  # type: ignore[misc]
        # Locks of other processes cannot be simulated in one.
        self.services.volume.held_leases = lambda: int(self.pod.trains)  # type: ignore[method-assign]

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something of this life, so that what it starts belongs to it."""
        return self._in_life.copy().run(function, *args, **kwargs)

    async def _live(self) -> None:
        self._in_life = copy_context()
        daemon = self.daemon
        await retried(daemon._prepare_volume)
        await retried(daemon._begin_run)
        try:
            async with task_group() as tasks:
                for work in daemon._tasks():
                    tasks.create_task(work)
                tasks.create_task(self._audit())
                tasks.create_task(self._until_done())
        except ConfigurationError:
            self.pod.refused()
        except _Ended:
            pass
        except Exception:
            self.pod.world.violate(f"{self} ends with an error: {traceback.format_exc()[-1500:]}")

    async def _until_done(self) -> None:
        await self.daemon._phase_control.run()
        self.exit_code = await self.daemon._finish()
        self.pod.ended(self.exit_code)
        raise _Ended

    async def _audit(self) -> None:
        """Believe nothing that the sidecar says is durable."""
        while True:
            for tracked in self.services.catalog.all():
                if tracked.state is State.COMMITTED and (tracked.name, tracked.version) not in self._said:
                    self._said.add((tracked.name, tracked.version))
                    self.pod.said_durable(tracked)
            await self.services.catalog.changed()

    def may_replace(self, name: str, commit: reader.Named) -> bool:
        return self.pod.may_replace(name, commit)

    @property
    def is_quiet(self) -> bool:
        services = self.services
        return services.inventory.scanned.is_set() and services.inventory.everything_durable()


class _Ended(Exception):
    """The daemon is done."""
