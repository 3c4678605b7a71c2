"""First writes of one checkpoint: the store refuses a body whose key has an object, so that a late request replaces nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from sidecar.core.commit.first_write import is_first_write
from sidecar.core.format import keys
from sidecar.errors import AlreadyExists, StoreError
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.store_link import StoreLink

T = TypeVar("T")


class WriteGuard(Protocol):
    """Passed before each request that writes."""

    async def pass_through(self, *, asks_now: bool = False) -> None:
        """Return if the checkpoint may still be written. ``asks_now``: an earlier answer of the store does not count.

        Raises:
            StoreError: It may not, or that cannot be known now.
        """
        ...


class FirstWrites:
    """Knows which keys of a checkpoint are taken: by its journal and, once the store has refused a body, by a listing."""

    def __init__(self, name: str, link: StoreLink, journal: Journal, guard: WriteGuard) -> None:
        self._name = name
        self._store = link.store
        self._executor = link.executor
        self._is_conditional = link.capabilities.conditional_files
        self._journal = journal
        self._guard = guard
        self._is_listed = False

    def is_first(self, key: str) -> bool:
        """Whether the store is to refuse a body if its key has an object. Also called from threads."""
        return is_first_write(key, conditional=self._is_conditional, taken=self._journal.taken)

    async def sent(self, key: str, put: Callable[[bool], Awaitable[T]]) -> T:
        """Send a body; again without the condition if its key has an object.

        Args:
            key: Its key.
            put: Sends it; called with whether the store is to refuse it if the key has an object.

        Raises:
            Exception: Raised by ``put`` and ``refused``.
        """
        if self.is_first(key):
            try:
                return await put(True)
            except AlreadyExists:
                await self.refused(key)
        return await put(False)

    async def refused(self, *refused: str) -> None:
        """Return if the bodies of these keys, which the store refused, may be sent without the condition.

        The first refusal costs a listing, so that the other objects of an earlier version are not sent twice, too.

        Raises:
            StoreError: The checkpoint may not be written any more, or that cannot be known now.
        """
        await self._guard.pass_through(asks_now=True)
        self._journal.taken.update(refused)
        if not self._is_listed:
            self._is_listed = True
            with suppress(StoreError):  # then each other object is refused once
                self._journal.taken |= await self._executor.once(self._listed)

    def _listed(self) -> set[str]:
        return {stored.key for stored in self._store.list(keys.folder(self._name))}
