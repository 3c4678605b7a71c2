"""Pull: a committed checkpoint from a store to a folder, by the downloader of a resume. An interrupted pull continues."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.commit.resume import PassedOver, newest_first
from sidecar.core.format.found_checkpoint import Identity, judge
from sidecar.core.format.manifest import Commit
from sidecar.core.format.rank_layout import Share
from sidecar.download.downloader import Downloader
from sidecar.download.quarantine import Quarantine
from sidecar.download.request import AskedBy, ResumeRequest, ResumeState
from sidecar.download.request_worker import RequestWorker
from sidecar.download.store_reader import StoreReader
from sidecar.errors import CheckpointRejected, ConfigurationError, RequestRefused, StoreUnavailable, UnusableNow
from sidecar.standalone.session import OnBytes, StoreSession
from sidecar.transfer.health import Health
from sidecar.volume.descriptors import opened
from sidecar.volume.lock import try_to_hold
from sidecar.volume.volume import Volume
from trainer_hook.contract import LOCK, SYSTEM_DIR, ContractError, Node

OURS = f"{SYSTEM_DIR}/pull"
"""Shows that the folder's system directory was made by a pull, which removes it at the end."""

_NONE_NOW = "no committed checkpoint can be pulled now; the same command tries again"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is pulled."""

    checkpoint: str | None = None
    """Its name; ``None``: the newest that passes verification."""
    ranks: frozenset[int] = frozenset()
    """Only the files that these ranks read; empty: all."""
    node: int | None = None
    """Of several nodes' files with one path, this node's; ``None``: that of the first rank."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Outcome of a pull."""

    state: ResumeState
    checkpoint: str | None
    path: str | None
    downloaded: bool
    """False: the folder had it already."""
    passed_over: tuple[PassedOver, ...]
    detail: str | None


class _Folder:
    """The checkpoints in the folder that have the names of those that are pulled."""

    def __init__(self, volume: Volume, catalog: Catalog) -> None:
        self._volume = volume
        self._catalog = catalog

    async def scan_until_settled(self) -> None:
        """Read the markers of all checkpoints in the folder."""
        for name in self._volume.names():
            with contextlib.suppress(FileNotFoundError, PermissionError, CheckpointRejected, ContractError):
                found = await asyncio.to_thread(self._volume.examine, name)
                self._catalog.finished(judge(found, Identity(Node(), "unknown")), held=False)

    def of_another_run(self) -> list[tuple[str, str]]:
        """Return nothing: the person says whose checkpoints are pulled."""
        return []


class Puller:
    """Pulls checkpoints into one folder."""

    def __init__(self, session: StoreSession, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._volume = Volume(folder)
        self._downloader = Downloader(session.store, self._volume, session.executor, is_remote=session.is_remote)

    async def pull(self, wanted: Wanted, on_bytes: OnBytes) -> Pulled:
        """Download a checkpoint, verify every byte, and give it its name in the folder at the end.

        Raises:
            RequestRefused: A sidecar uses the folder as its volume.
            ConfigurationError: The folder cannot be made, or the ranks are not those of the checkpoint.
            StoreError: A request failed.
        """
        is_new = not (self._volume / SYSTEM_DIR).is_folder()
        with opened(self._prepare(is_new=is_new)):
            try:
                return await self._pull(wanted, on_bytes)
            except ConfigurationError:
                if is_new:  # else it may hold what an interrupted pull left
                    self._clean_up()
                raise

    async def _pull(self, wanted: Wanted, on_bytes: OnBytes) -> Pulled:
        names = [wanted.checkpoint] if wanted.checkpoint else await self._names()
        passed: list[PassedOver] = []
        for name in names:
            request = await self._try(name, wanted, on_bytes)
            # Other requests may have succeeded since the one that failed.
            failed = request.error if isinstance(request.error, StoreUnavailable) else None
            status, trouble = request.status, failed or self._session.executor.health.trouble
            if status.state is ResumeState.FAILED and trouble is not None:
                raise StoreUnavailable(f"{name}: {trouble}: what arrived is kept, and the same command continues")
            passed += status.passed_over
            is_final = status.state is ResumeState.READY or (status.state is ResumeState.FAILED and not status.passed_over)
            if is_final or wanted.checkpoint:
                break
        else:
            whole = any(each.may_be_whole for each in passed)
            state = ResumeState.FAILED if whole else ResumeState.NONE
            if state is ResumeState.NONE:
                self._clean_up()
            return Pulled(state, None, None, False, tuple(passed), _NONE_NOW if whole else None)
        if status.state in (ResumeState.READY, ResumeState.NONE):
            self._clean_up()
        is_downloaded = status.source == "store"
        return Pulled(status.state, status.checkpoint, status.path, is_downloaded, tuple(passed), status.detail)

    async def _names(self) -> list[str]:
        # Two different requests, as for a resume: a name that one damaged answer hides is in the other.
        return newest_first({*await self._downloader.list_folders(), *await self._downloader.some_names()})

    async def _try(self, name: str, wanted: Wanted, on_bytes: OnBytes) -> ResumeRequest:
        node, share = await self._part(name, wanted)
        events = Events()
        catalog = Catalog(events)
        worker = RequestWorker(
            volume=self._volume,
            catalog=catalog,
            events=events,
            node=node,
            quarantine=Quarantine(self._volume.journal / "quarantine.json"),
            inventory=_Folder(self._volume, catalog),
            reader=StoreReader(Health(), self._downloader),
        )
        request = ResumeRequest(name, None, share, AskedBy.PERSON)
        working = asyncio.create_task(worker.answer(request))
        try:
            while not working.done():
                status = request.status
                on_bytes(status.checkpoint or name, status.done_bytes, status.total_bytes)
                await asyncio.wait({working}, timeout=0.2)
            await working
        finally:
            working.cancel()
            await asyncio.wait({working})
        return request

    async def _part(self, name: str, wanted: Wanted) -> tuple[Node, Share | None]:
        """Return the node as which a checkpoint is read, and its ranks; those of a damaged commit do not matter."""
        try:
            found = await self._downloader.commit(name)
        except (ContractError, UnusableNow):
            return Node(), None
        if found is None:
            return Node(), None
        commit, _ = found
        share = _share(commit, wanted) if wanted.ranks else None
        index = wanted.node or 0
        if wanted.node is None and share is not None:
            index = min(share.ranks) * len(commit.manifests) // share.world_size
        if index >= len(commit.manifests):
            raise ConfigurationError(f"--node={index}: {name} was saved by {len(commit.manifests)} nodes, numbered from 0")
        return Node(index, len(commit.manifests)), share

    def _prepare(self, *, is_new: bool) -> int:
        """Make the folder, and return the descriptor of its lock."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._volume.prepare()
            if is_new:
                (self._volume / OURS).publish(b"")
            lock = try_to_hold(self._volume / LOCK)
        except OSError as error:
            where = error.filename or self._folder
            raise ConfigurationError(f"{where}: {error.strerror}: choose a folder that you can write to") from None
        if lock is None:
            raise RequestRefused(
                f"{self._folder}: a sidecar, or another pull, uses this folder: ask the sidecar, 'checkpoint-sidecar resume'"
            )
        return lock

    def _clean_up(self) -> None:
        with contextlib.suppress(OSError):
            (self._volume / OURS).status()
            (self._volume / SYSTEM_DIR).discard()


def _share(commit: Commit, wanted: Wanted) -> Share:
    if commit.world_size is None:
        raise ConfigurationError(f"--rank: {commit.name} does not say how many ranks saved it: pull it without --rank")
    try:
        return Share(commit.world_size, wanted.ranks)
    except ValueError as error:
        raise ConfigurationError(f"--rank: {commit.name}: {error}") from None
