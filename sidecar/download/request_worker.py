"""Worker of a resume request: chooses the newest usable checkpoint, downloads it, and records those passed over."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.catalog.inventory import SettledVolume
from sidecar.core.commit.resume import MissingObject, PassedOver, matches_train_call, newest_first, next_to_try
from sidecar.core.format import obstacles
from sidecar.core.format.manifest import Commit
from sidecar.download.downloader import Downloader
from sidecar.download.local_copies import LocalCopies, step_of_local
from sidecar.download.offers import Offer, Unproven
from sidecar.download.patience import Patience
from sidecar.download.pending_commit import PendingCommits
from sidecar.download.quarantine import UNREADABLE, KnownBad, Quarantine
from sidecar.download.request import LATEST, OBSTRUCTION, AskedBy, Obstructed, ResumeRequest, ResumeState
from sidecar.download.store_reader import StoreReader
from sidecar.errors import CheckpointChanged, CorruptObject, NotFound, RefusedObject, UnreadableObject, UnusableNow
from sidecar.transfer.executor import awaited, refusals_judged
from sidecar.volume.files import FULL
from sidecar.volume.retry import retried
from sidecar.volume.volume import Volume
from trainer_hook.contract import META_OF_DOWNLOAD, ContractError, Node

log = structlog.get_logger()

LOCAL_PATIENCE_S = 10.0
"""Seconds to wait for an unreachable store if the volume holds a checkpoint to resume from."""


class RequestWorker:
    """Works on one request at a time."""

    def __init__(
        self,
        *,
        volume: Volume,
        catalog: Catalog,
        events: Events,
        node: Node | None,
        quarantine: Quarantine,
        inventory: SettledVolume,
        reader: StoreReader,
        make_room: Callable[[int], Awaitable[list[str]]] | None = None,
    ) -> None:
        self._volume = volume
        self._catalog = catalog
        self._events = events
        self._node = node or Node()
        self._knows_node_count = node is not None
        self._quarantine = quarantine
        self._inventory = inventory
        self._reader = reader
        self.local = LocalCopies(volume, catalog, reader, nodes=self._node.count)
        self._pending = PendingCommits(catalog, nodes=self._node.count)
        self._unreadable: set[str] = set()
        """Steps whose full patience was already spent."""
        self._make_room = make_room
        """Deletes durable checkpoints from the volume until the given number of bytes is free, and returns their names."""

    async def answer(self, request: ResumeRequest) -> None:
        """Work on a request until it has ended."""
        try:
            with awaited():
                await self._inventory.scan_until_settled()
                if request.wanted == LATEST:
                    await self._latest(request)
                else:
                    await self._reader.once_granted()
                    offer = await self._verified_offer(request, request.wanted)
                    if offer is None or not await self._use_offer(request, offer):
                        self._nothing(request)
        except OSError as error:
            what = request.status.checkpoint or self._volume.root
            detail = f"{what}: {error.strerror or error}: {obstacles.hint(error.errno)}"
            self.end(request, ResumeState.FAILED, detail=detail)
        except Obstructed as obstructed:
            self.end(request, ResumeState.FAILED, detail=str(obstructed))
        except Exception as error:
            request.error = error
            log.exception("resume_failed")
            self.end(request, ResumeState.FAILED, detail=f"{type(error).__name__}: {error}")

    async def _latest(self, request: ResumeRequest) -> None:
        fallback = await self.local.newest(request.train_call, restored=True)
        names = await self._in_store(patience_s=None if fallback is None else LOCAL_PATIENCE_S)
        if names is not None:
            # The first files of a part may be on their way: the store has nothing under its name yet.
            names = newest_first({*names, *self._pending.names()})
        if names is not None and await self._from_store(request, names):
            return
        # Looked up again: the trainer may have finished a checkpoint while the store was read. And a checkpoint downloaded and
        # verified earlier is better than a start from scratch.
        local = await self.local.newest(request.train_call, restored=True, committed=names or [])
        if local is not None:
            self._use_local(request, local)
        else:
            self._nothing(request)

    async def _in_store(self, *, patience_s: float | None) -> list[str] | None:
        """Return the names to try, newest first; ``None`` when the store does not answer within ``patience_s``."""
        try:
            return newest_first(await self._reader.list_folders(patience_s=patience_s))
        except TimeoutError:
            hint = "the newest checkpoint on the volume is used"
            log.warning("resume_without_store", hint=hint, trouble=self._reader.health.unreachable)
            return None

    async def _from_store(self, request: ResumeRequest, names: list[str]) -> bool:
        """Return whether a committed step was made usable; False also if one on the volume is as new as the newest usable."""
        tried: set[str] = set()
        is_confirmed = False
        local_step = await self._local_step(request, names)
        while True:
            name = next_to_try(names, tried, local_step=local_step)
            if name is None and (is_confirmed or set(names) - tried):
                return False
            offer = await self._verified_offer(request, name) if name else None
            if not is_confirmed and (offer is not None or name is None):
                # A listing has no checksum: a name damaged in transit would hide the newest step. Before the first use of a
                # step, and after all were tried in vain, a second listing confirms the first.
                is_confirmed = True
                names, before = newest_first({*names, *await self._second_listing(name)}), names
                if names != before:
                    continue
            if offer is not None and await self._changes_soon(request, offer.name, offer):
                offer = await self._verified_offer(request, offer.name)
            if offer is not None and await self._use_offer(request, offer):
                return True
            if name is not None:
                tried.add(name)
            local_step = await self._local_step(request, names)

    async def _local_step(self, request: ResumeRequest, names: list[str]) -> int | None:
        """Return the newest step on the volume that needs no download; ``None``: there is none."""
        local = await self.local.newest(request.train_call, committed=names)
        return None if local is None else step_of_local(local)

    async def _second_listing(self, found: str | None) -> list[str]:
        """Return the names of another listing. Unless a step was ``found``, a request of another kind is added."""
        reader = await self._reader.once_open()
        names = await reader.list_folders()
        return names if found is not None else [*names, *await reader.some_names()]

    async def _verified_offer(self, request: ResumeRequest, name: str) -> Offer | None:
        """Read the documents of a checkpoint, before any of its files. Returns ``None`` if they rule it out for the request."""
        reader, crc = await self._reader.once_open(), None
        request.considered, patience = name, self._patience(reader, request, name)
        while True:
            try:
                with refusals_judged(patience.refusals):
                    if (found := await self._eligible_commit(request, name, reader)) is None:
                        return None
                    commit, crc = found
                    return await reader.offer(commit, crc, request.share)
            except Unproven as error:
                try:
                    await patience.unfit(error)
                except UnreadableObject as unreadable:
                    self._cannot_read(request, name, unreadable)
                    return None
            except RefusedObject as refused:
                self._cannot_read(request, name, refused)
                return None
            except UnusableNow as unusable:
                self._pass_over(request, name, str(unusable), may_be_whole=True)
                return None
            except KnownBad as known:
                self._quarantine.learned(name, crc or UNREADABLE, str(known))
                self._pass_over(request, name, str(known))
                return None
            except ContractError as error:
                await self._is_bad(request, name, crc, error)
                return None

    async def _eligible_commit(self, request: ResumeRequest, name: str, reader: Downloader) -> tuple[Commit, str] | None:
        """Return the commit of a checkpoint and its checksum; ``None``: it was passed over, or is of another call.

        Raises:
            ContractError, UnusableNow: As ``Offers.commit``.
        """
        while (found := await reader.commit(name)) is None:
            if self.local.is_of_another_call(name, request.train_call):
                return None
            if not await self._changes_soon(request, name, None):
                self._pass_over(request, name, "not committed: without its commit it is not known to be complete")
                return None
        commit, crc = found
        if not matches_train_call(commit.meta, request.train_call):
            return None
        if (reason := self._quarantine.reason(name, crc)) is not None:
            self._pass_over(request, name, reason)
            return None
        return found

    async def _use_offer(self, request: ResumeRequest, offer: Offer) -> bool:
        """Make the files of an offer usable. Returns True if that ended the request; False: it was passed over."""
        name = offer.name
        try:
            await retried(self._download_with_room, request, offer)
        except CheckpointChanged as changed:
            why = OBSTRUCTION[request.asked_by]
            self._pass_over(request, name, f"{changed.path} on the volume is in the way: {why}", may_be_whole=True)
            await self._inventory.scan_until_settled()
        except (UnreadableObject, RefusedObject) as error:
            self._cannot_read(request, name, error)
        except UnusableNow as error:
            self._pass_over(request, name, str(error), may_be_whole=True)
        except (CorruptObject, MissingObject, NotFound) as error:
            await self._is_bad(request, name, offer.commit_crc, error)
        except OSError as error:
            if not self._is_of_one_step(name, error):
                raise
            reason = f"the volume cannot hold its files: {error.strerror or error}"
            self._pass_over(request, name, reason, may_be_whole=True)
        else:
            self._quarantine.verified(name, offer.commit_crc, has_record=offer.has_quarantine_record)
            self._unreadable.discard(name)
            return True
        return False

    def _is_of_one_step(self, name: str, error: OSError) -> bool:
        """Whether an error of the volume concerns this step alone: its file names, or an obstacle in its place."""
        at = error.filename if isinstance(error.filename, str) else ""
        is_in_its_place = f"{at}/".startswith((f"{name}/", f"{self._volume.root / name}/"))
        return obstacles.is_of_one_step(error.errno) or is_in_its_place

    async def _download_with_room(self, request: ResumeRequest, offer: Offer) -> None:
        """Download or keep a checkpoint; if it does not fit, once more after durable ones have left the volume for it."""
        try:
            await self._download_or_keep(request, offer)
            return
        except OSError as error:
            if error.errno not in FULL or self._make_room is None:
                raise
            wanted_bytes = sum(entry.size_bytes for entry in offer.files(self._node))
            if not (gone := await self._make_room(wanted_bytes)):
                raise
            log.info("resume_made_room", checkpoint=offer.name, deleted=gone, reason="it did not fit")
        await self._download_or_keep(request, offer)

    async def _download_or_keep(self, request: ResumeRequest, offer: Offer) -> None:
        """Download a checkpoint, unless the volume has the same files already, and end the request: it is ready.

        Raises:
            CheckpointChanged: What the volume has under its name must not be replaced.
            OSError: The volume cannot hold it.
        """
        name, commit, reader = offer.name, offer.commit, await self._reader.once_open()
        request.trying(name, commit.step, commit.size_bytes, commit.meta)
        await self.local.deletion_ended(name)  # one that began before the request was known; none begins now
        self._warn_if_elastic(offer)
        known = self._catalog.get(name)
        if not self.local.is_replaceable(commit, is_chosen=request.wanted != LATEST):
            raise CheckpointChanged(name)
        source = "local"
        if not (self._volume.marker_version(name) and await reader.is_local(offer, self._node)):
            source = "store"
            is_beside_trainer = request.asked_by is AskedBy.PERSON or request.is_unattended
            if is_beside_trainer and not await self.local.is_free_beside_trainer(name):
                if request.asked_by is AskedBy.PERSON:
                    raise CheckpointChanged(name)
                if request.is_unattended:
                    raise Obstructed(f"{name} on the volume is in the way: no trainer waits, it may be writing it now")
            await self._download(request, offer, reader)
        self.end(
            request,
            ResumeState.READY,
            checkpoint=name,
            path=str(self._volume.root / name),
            step=commit.step,
            source=source,
            downloaded=source == "store" or (known is not None and known.is_restored),
            save=commit.identity,
            meta=dict(commit.meta),
        )

    async def _download(self, request: ResumeRequest, offer: Offer, reader: Downloader) -> None:
        name = offer.name
        self._volume.prepare()  # a script that empties its output folder deletes the system's directories, too
        request.downloading()
        size_bytes, left_out = sum(entry.size_bytes for entry in offer.files(self._node)), offer.left_out(self._node)
        self._events.happened("resume_download_started", checkpoint=name, size_bytes=size_bytes, files_left_out=left_out)

        def progressed(done_bytes: int, total_bytes: int) -> None:
            request.progressed(done_bytes, total_bytes)
            progress: dict[str, Any] = {"checkpoint": name, "done_bytes": done_bytes, "total_bytes": total_bytes}
            self._events.happened("resume_download_progress", quiet=True, **progress)

        patience = self._patience(reader, request, name)
        with refusals_judged(patience.refusals):
            await reader.download(offer, self._node, progressed, patience=patience)

    def _patience(self, reader: Downloader, request: ResumeRequest, name: str) -> Patience:
        was_spent = any(passed.checkpoint in self._unreadable for passed in request.status.passed_over)
        return reader.patience(is_short=was_spent or name in self._unreadable)

    def _warn_if_elastic(self, offer: Offer) -> None:
        if self._knows_node_count and len(offer.manifests) != self._node.count:
            self._events.happened(
                "resume_with_other_node_count",
                level="warning",
                checkpoint=offer.name,
                saved_nodes=len(offer.manifests),
                nodes=self._node.count,
                saved_world_size=offer.commit.world_size,
                hint="every node gets the files of all; only a sharded checkpoint (DCP) fits another number of ranks exactly",
            )

    def _use_local(self, request: ResumeRequest, tracked: Tracked) -> None:
        assert tracked.checkpoint is not None
        self.end(
            request,
            ResumeState.READY,
            checkpoint=tracked.name,
            path=str(self._volume.root / tracked.name),
            step=tracked.checkpoint.step,
            source="local",
            downloaded=tracked.is_restored,
            save=tracked.checkpoint.identity,
            meta={key: value for key, value in tracked.checkpoint.meta.items() if key not in META_OF_DOWNLOAD},
        )

    async def _is_bad(self, request: ResumeRequest, name: str, crc: str | None, error: Exception) -> None:
        """Quarantine a commit that is damaged by the store's own metadata, unless it has been replaced meanwhile."""
        if crc is not None and await self._committed_crc(name) != crc:
            self._pass_over(request, name, f"{error}; its commit was revoked or replaced meanwhile", may_be_whole=True)
            return
        missing = error.key if isinstance(error, MissingObject) else None
        self._quarantine.add(name, crc or UNREADABLE, str(error), missing=missing)
        repaired = "checkpoint-sidecar bad release" if missing is None else "the next resume tries it"
        hint = f"the next older one is tried; once this one is repaired: {repaired}"
        self._events.happened("checkpoint_found_bad", level="error", checkpoint=name, reason=str(error), hint=hint)
        self._pass_over(request, name, str(error))

    async def _committed_crc(self, name: str) -> str | None:
        try:
            found = await (await self._reader.once_open()).commit(name)
        except (ContractError, UnusableNow):
            return None
        return None if found is None else found[1]

    async def _changes_soon(self, request: ResumeRequest, name: str, offer: Offer | None) -> bool:
        """Wait where the job may be about to commit this node's part of a step. Returns whether its commit has changed.

        ``offer``: of the present commit; ``None``: there is none.
        """
        if request.asked_by is not AskedBy.TRAINER:
            return False
        commit, crc = (None, None) if offer is None else (offer.commit, offer.commit_crc)
        return await self._pending.changed(name, commit, crc, committed_crc=self._committed_crc, asked_s=request.asked_s)

    def _cannot_read(self, request: ResumeRequest, name: str, error: UnreadableObject | RefusedObject) -> None:
        self._unreadable.add(name)
        self._pass_over(request, name, str(error), may_be_whole=True)

    def _pass_over(self, request: ResumeRequest, name: str, reason: str, *, may_be_whole: bool = False) -> None:
        request.pass_over(PassedOver(name, reason, may_be_whole))
        if may_be_whole:
            hint = "an older one is tried; the next request tries this one again"
            self._events.happened("checkpoint_passed_over", level="warning", checkpoint=name, reason=reason, hint=hint)

    def _nothing(self, request: ResumeRequest) -> None:
        """End the request without a checkpoint: as failed, not as none, while one of those passed over may be whole."""
        whole = [passed for passed in request.status.passed_over if passed.may_be_whole]
        if not whole:
            for name, reason in self._inventory.of_another_run():
                self._pass_over(request, name, reason)
            self.end(request, ResumeState.NONE)
            return
        more = f"; nor can {len(whole) - 1} others that are committed" if len(whole) > 1 else ""
        detail = f"{whole[0].checkpoint} is committed and cannot be had now: {whole[0].reason}{more}; ask again"
        self.end(request, ResumeState.FAILED, detail=detail)

    def end(self, request: ResumeRequest, state: ResumeState, **fields: Any) -> None:
        """End a request, unless it was preempted: then the error is only the cancellation of its task."""
        if request.is_interrupted:
            return
        request.end(state, **fields)
        known: dict[str, Any] = {
            key: fields[key] for key in ("checkpoint", "step", "source", "detail") if fields.get(key) is not None
        }
        if request.status.passed_over:
            known["passed_over"] = {each.checkpoint: each.reason for each in request.status.passed_over}
        self._events.happened(
            f"resume_{state.value}",
            level="error" if state is ResumeState.FAILED else "info",
            took_s=round(time.monotonic() - request.asked_s, 3),
            **known,
        )
