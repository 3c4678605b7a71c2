"""Quarantine of commits that failed verification, shared by all nodes through the store, so that each is tried only once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import structlog

from sidecar.core.commit.damage import is_record_in_force
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import Quarantined, decode, encode
from sidecar.errors import AlreadyExists, NotFound, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.volume.opener import Place
from trainer_hook.contract import ContractError, Node, is_checkpoint_name, rfc3339
from trainer_hook.contract.plain_text import plain_text

log = structlog.get_logger()

UNREADABLE = "unreadable"
"""Substitute for the checksum of a commit that could not be read at all."""
MAX_BYTES = 8 << 20
ANSWER_S = 30.0
"""Seconds for the requests of one record."""
SHARE_RETRY_S = 30.0
"""Seconds until the next try after the store refused a record."""


class KnownBad(ContractError):
    """A node quarantined this commit in the store."""


@dataclass(frozen=True, slots=True)
class _Entry:
    crc: str
    reason: str
    at_s: float
    """When the damage was found, epoch seconds."""
    shared: bool = False
    """Whether the record is in the store. From then on, the store decides whether it still holds."""
    missing: str | None = None
    """Key of the object that was missing; ``None``: the damage is another one."""


def decode_cache(raw: bytes) -> dict[str, _Entry]:
    """Return the entries of the local file that are in the store, too, by name; none if it is malformed."""
    try:
        return {
            name: _Entry(
                plain_text(str(fields["crc"])), plain_text(str(fields["reason"])), float(fields.get("at_s", 0.0)), True
            )
            for name, fields in json.loads(raw).items()
            if fields.get("shared") is True and is_checkpoint_name(name)
        }
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
        return {}


class Quarantine:
    """Quarantined commits, by name and checksum: a new commit of a step is not affected by an old one's record.

    A finding takes effect on this node at once, and ``Sharing`` writes it to the store. From then on the record in the store
    decides, for this node as for the others. The local file is a cache of the store's records.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[str, _Entry] = {}
        self._released: set[str] = set()
        self._news = asyncio.Event()
        with contextlib.suppress(OSError):
            self._known = decode_cache(place.read(max_bytes=MAX_BYTES)[0])

    def reason(self, name: str, crc: str) -> str | None:
        """Return why a commit is quarantined, from findings that are not in the store yet; ``None``: there is none.

        A finding that an object was missing says nothing about a later listing.
        """
        known = self._known.get(name)
        return known.reason if known and known.crc == crc and not known.shared and known.missing is None else None

    @property
    def quarantined(self) -> dict[str, str]:
        """Return the reasons of all quarantined commits, by name."""
        return {name: known.reason for name, known in self._known.items()}

    def holds(self, name: str, crc: str) -> bool:
        """Whether this node knows that a commit is quarantined."""
        known = self._known.get(name)
        return known is not None and known.crc == crc

    def add(self, name: str, crc: str, reason: str, *, missing: str | None = None) -> None:
        """Quarantine a commit that failed verification. ``missing``: key of the object that was missing."""
        self._known[name] = _Entry(crc, reason, time.time(), missing=missing)
        self._written()

    def learned(self, name: str, crc: str, reason: str) -> None:
        """Add a quarantine record read from the store."""
        self._known[name] = _Entry(crc, reason, time.time(), shared=True)
        self._written()

    def committed(self, name: str, *, committed_at_s: float | None) -> None:
        """Release a checkpoint whose commit was replaced.

        ``committed_at_s``: when the present one was written, epoch seconds: one that is older than the finding is the
        quarantined one, which stays. ``None``: not known, so it is later.
        """
        known = self._known.get(name)
        if known is not None and (committed_at_s is None or committed_at_s > known.at_s):
            self.verified(name, known.crc, has_record=True)

    def verified(self, name: str, crc: str, *, has_record: bool) -> None:
        """Release a checkpoint whose present commit was verified. ``has_record``: the store has a record of that commit."""
        known = self._known.pop(name, None)
        gone = {known.crc} if known is not None else set()
        if has_record:
            gone.add(crc)
        if gone:
            self._released.update(keys.quarantined(name, each) for each in gone)
            self._written()

    # Read by the task that publishes findings to the store.

    def unshared(self, node: str | None) -> dict[str, Quarantined]:
        """Return the findings of a node that are not in the store yet, as records, by name."""
        return {
            name: Quarantined(
                commit_crc64nvme=known.crc, reason=known.reason, node=node, at=rfc3339(known.at_s), missing=known.missing
            )
            for name, known in self._known.items()
            if not known.shared and known.crc != UNREADABLE
        }

    def shared(self, name: str, crc: str) -> None:
        """Record that a finding is in the store."""
        known = self._known.get(name)
        if known is not None and known.crc == crc:
            self._known[name] = replace(known, shared=True)
            self._written()

    def take_released(self) -> set[str]:
        """Return the keys of released records, and forget them."""
        released, self._released = self._released, set()
        return released

    def release_again(self, keys_of_records: set[str]) -> None:
        """Keep the keys of released records that could not be deleted."""
        self._released |= keys_of_records

    def changed(self) -> Coroutine[Any, Any, object]:
        """Return what waits for the next change, from this call on, whenever it is awaited."""
        return self._news.wait()

    def _written(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        try:
            self._place.publish(json.dumps({name: asdict(known) for name, known in self._known.items()}).encode())
        except OSError as error:
            log.warning("bad_record_not_written", error=str(error))


class Sharing:
    """Writes this node's findings to the store, next to the commit. No resume waits for it."""

    def __init__(self, quarantine: Quarantine, store: Store, executor: StoreExecutor, *, node: Node | None) -> None:
        self._quarantine = quarantine
        self._store = store
        self._executor = executor
        self._node = None if node is None else str(node.index)

    async def run(self) -> None:
        """Share until cancelled."""
        while True:
            news = asyncio.ensure_future(self._quarantine.changed())
            try:
                if await self.share():
                    await news
                else:
                    await asyncio.sleep(SHARE_RETRY_S)
            finally:
                news.cancel()

    async def share(self) -> bool:
        """Write new records and delete released ones. What the store refuses is passed over.

        Returns:
            Whether nothing is left to do.
        """
        released = self._quarantine.take_released()
        done = [await self._delete(released)] if released else []
        for name, record in self._quarantine.unshared(self._node).items():
            done.append(await self._is_done(self._share_one(name, record), of=name))
        return all(done) and not self._quarantine.unshared(self._node)

    async def _delete(self, released: set[str]) -> bool:
        is_done = await self._is_done(self._executor.persistently(self._store.delete, released), of=min(released))
        if not is_done:
            self._quarantine.release_again(released)
        return is_done

    async def _is_done(self, work: Coroutine[Any, Any, None], *, of: str) -> bool:
        """Whether the store answered in time: one that refuses one object for ever must not keep the other records."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await work
        except (StoreError, TimeoutError) as error:
            hint = f"tried again in {SHARE_RETRY_S:.0f} s"
            log.warning("bad_records_not_shared", of=of, error=str(error) or "no answer", hint=hint)
            return False
        return True

    async def _share_one(self, name: str, record: Quarantined) -> None:
        # Not if the commit was replaced or deleted: nothing would ever delete the record.
        if await self._stands(name, record.commit_crc64nvme):
            await self._write(name, record)
        self._quarantine.shared(name, record.commit_crc64nvme)

    async def _stands(self, name: str, crc: str) -> bool:
        try:
            raw = await self._executor.persistently(self._store.get, keys.commit(name))
        except NotFound:
            return False
        return checksum.text_of(raw) == crc

    async def _write(self, name: str, record: Quarantined) -> None:
        key, is_passing = keys.quarantined(name, record.commit_crc64nvme), record.missing is not None
        with contextlib.suppress(AlreadyExists):  # of a record of other damage, which does not end by itself
            await self._executor.persistently(self._store.put, key, encode(record), only_if_absent=is_passing)


async def has_obsolete_record(name: str, crc: str, listed: Mapping[str, object], store: Store, executor: StoreExecutor) -> bool:
    """Whether a quarantine record among the checkpoint's keys names this commit, and is not in force.

    Raises:
        KnownBad: A record is in force.
        StoreError: The record cannot be read now.
    """
    key = keys.quarantined(name, crc)
    if key not in listed:
        return False
    try:
        found = decode(Quarantined, await executor.persistently(store.get, key), key=key)
    except NotFound:
        return False  # released meanwhile
    except ContractError as error:
        raise KnownBad(f"{name} is bad, and its record cannot be read: {error}") from None
    if not is_record_in_force(found.missing, listed):
        return True
    by = f"node {found.node}" if found.node is not None else "a node"
    raise KnownBad(f"{found.reason} (found by {by}{f' at {found.at}' if found.at else ''})")
