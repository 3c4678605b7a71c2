"""First writes of one checkpoint: the store refuses a body whose key has an object, so that a late request replaces nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from sidecar.core.commit.first_write import is_first_write, path_of, shows_another_writer
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
        self._shared = link.shared_paths
        self._journal = journal
        self._guard = guard
        self._tries = Counter[str]()
        """How often each body was sent on the condition."""
        self._is_listed = False

    def begin(self, key: str) -> bool:
        """Return whether the store is to refuse a body if its key has an object. Called before each try, also in threads."""
        is_first = is_first_write(
            key, self._name, conditional=self._is_conditional, taken=self._journal.taken, shared=self._shared.paths
        )
        self._tries[key] += is_first
        return is_first

    async def sent(self, key: str, put: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``put``, which sends a body; it is called again if the store refuses the body.

        Raises:
            Exception: Raised by ``put`` and ``refused``.
        """
        before = self._tries[key]
        try:
            return await put()
        except AlreadyExists:
            if self._tries[key] == before:  # it was sent without the condition
                raise
            await self.refused(key)
        return await put()

    async def refused(self, *refused: str) -> None:
        """Return if the bodies of these keys, which the store refused, may be sent without the condition.

        The first refusal by another writer's object costs a listing, so that its other objects are not sent twice, too. Among
        several nodes, where a listing is long, the other writer is most likely another node: its paths are remembered.

        Raises:
            StoreError: The checkpoint may not be written any more, or that cannot be known now.
        """
        is_other = any(shows_another_writer(tries=self._tries[key]) for key in refused)
        await self._guard.pass_through(asks_now=is_other)
        self._journal.taken.update(refused)
        if is_other and self._shared.has_other_nodes:
            self._shared.paths.update(path_of(key, self._name) for key in refused)
        elif is_other and not self._is_listed:
            self._is_listed = True
            with suppress(StoreError):  # then each other object is refused once
                self._journal.taken |= await self._executor.once(self._listed)

    def _listed(self) -> set[str]:
        return {stored.key for stored in self._store.list(keys.folder(self._name))}
