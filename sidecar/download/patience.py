"""Retry policy of damaged and refused reads: until the object is whole, known to be bad, or the time is over."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

import structlog

from sidecar.core.commit.damage import is_known_bad, is_patience_over, pause_s
from sidecar.core.commit.resume import MissingObject
from sidecar.core.format import keys
from sidecar.errors import AccessRefused, CorruptObject, NotFound, RefusedObject, StoreError, UnreadableObject
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor

log = structlog.get_logger()


class Refusals:
    """Judge of the refusals of one request. A refusal counts only if the store delivers another object of the prefix.

    If the store refuses everything, for example during a change of credentials, the request is retried without limit, and no
    step is passed over. Several refusals have to count: the credentials may have been corrected just before the other object
    was read.
    """

    def __init__(self, store: Store, executor: StoreExecutor, *, patience_s: float) -> None:
        self._store = store
        self._executor = executor
        self._patience_s = patience_s
        self._alone = 0
        """Number of consecutive refusals that counted."""
        self._since_s = 0.0
        """Time of the first of them, monotonic seconds."""

    async def __call__(self, error: AccessRefused) -> bool:
        """Record a refusal. Returns whether it counts.

        Raises:
            RefusedObject: The time is over.
        """
        now_s = time.monotonic()
        try:
            await self._executor.once(self._store.get, keys.RUN)
        except AccessRefused:
            self._alone = 0
            return False
        except StoreError:
            return False
        self._since_s = self._since_s if self._alone else now_s
        self._alone += 1
        for_s = now_s - self._since_s
        if is_patience_over(reads=self._alone, since_first_s=for_s, patience_s=self._patience_s):
            raise RefusedObject(str(error), tries=self._alone, for_s=for_s)
        return True


class Patience:
    """Retry policy of one step. Reads are counted per object, so occasional damage in transit only slows the download."""

    def __init__(self, store: Store, executor: StoreExecutor, *, patience_s: float) -> None:
        self._store = store
        self._executor = executor
        self._patience_s = patience_s
        self._came: defaultdict[str, list[str]] = defaultdict(list)
        self._first_s: dict[str, float] = {}

    async def damaged(self, key: str, error: CorruptObject | NotFound, *, size_bytes: int, etags: Collection[str]) -> None:
        """Record a damaged read, and wait until the object is to be read again.

        ``etags``: those that manifests recorded for the object.

        Raises:
            CorruptObject, NotFound: ``error``: the store's own metadata show that the object differs from the recorded one.
            MissingObject: They show that it was deleted.
            UnreadableObject: The store's metadata show no damage, and the time is over.
        """
        came = self._came[key]
        came.append(error.got if isinstance(error, CorruptObject) else "nothing")
        there = await self._stat(key)
        is_bad = is_known_bad(size_bytes=size_bytes, etags=etags, there=there, came=came)
        # This answer has no checksum and used the same network that damages objects: a second request must confirm it.
        if is_bad and await self._listed(key) == there:
            raise error if there else MissingObject(key)
        await self._pause(key, str(error))

    async def unfit(self, error: Exception) -> None:
        """Record documents that contradict each other, and wait until they are to be read again.

        Raises:
            UnreadableObject: The time is over.
        """
        self._came[""].append(str(error))
        await self._pause("", str(error))

    def refusals(self) -> Refusals:
        """Return a new judge for the refusals of one request."""
        return Refusals(self._store, self._executor, patience_s=self._patience_s)

    async def _stat(self, key: str) -> tuple[int, str] | None:
        with suppress(NotFound):
            stored = await self._executor.persistently(self._store.stat, key)
            return stored.size_bytes, stored.etag
        return None

    async def _listed(self, key: str) -> tuple[int, str] | None:
        """Return size and etag of an object as ``_stat``, from the listing of the whole checkpoint."""
        folder = keys.folder(key.partition("/")[0])
        found = await self._executor.persistently(lambda: [s for s in self._store.list(folder) if s.key == key])
        return (found[0].size_bytes, found[0].etag) if found else None

    async def _pause(self, key: str, why: str) -> None:
        now_s, reads = time.monotonic(), len(self._came[key])
        since_first_s = now_s - self._first_s.setdefault(key, now_s)
        if is_patience_over(reads=reads, since_first_s=since_first_s, patience_s=self._patience_s):
            raise UnreadableObject(why, reads=reads, for_s=since_first_s)
        wait_s = pause_s(reads)
        log.warning("resume_read_damaged", error=why, reads=reads, again_in_s=wait_s)
        await asyncio.sleep(wait_s)
