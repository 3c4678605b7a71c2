"""Revocation of commits, in the order of I4, and deletion of objects that no commit names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from sidecar.core.commit.commit import attempt_of
from sidecar.core.commit.remainder import is_remainder, last_write
from sidecar.core.format import keys
from sidecar.core.format.manifest import BegunDeletion, decode, encode
from sidecar.errors import AccessRefused, AlreadyExists, NotFound, UnusableNow
from sidecar.lifecycle.lease import Lease, NoLease
from sidecar.repository.documents import Documents, StoredCommit
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError

Justified = Callable[[], Awaitable[bool]]
"""Whether a deletion is still wanted: a store that refuses deletions, or does not answer, may take them hours later."""


class Revocation(Documents):
    """Revokes commits, so that their steps can be written again or deleted."""

    def __init__(self, store: Store, executor: StoreExecutor, *, lease: Lease | None = None) -> None:
        """Start. ``lease``: checked before each revocation; ``None``: there is no other pod."""
        super().__init__(store, executor)
        self.lease = lease or NoLease()

    async def revoke_commit(
        self, name: str, *, judged: StoredCommit | None = None, is_justified: Justified | None = None
    ) -> bool:
        """Revoke a commit, so that the step can be written again: delete the commit, then the manifests it names (I4).

        Other manifests stay: other nodes of our attempt may be publishing theirs.

        ``judged``: the commit to revoke. If another one has replaced it meanwhile, that one stays. ``None``: any.
        ``is_justified``: awaited before each try; the commit stays if it returns false.

        Returns:
            Whether there is no commit now.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
        """
        await self.lease.require_not_fenced()
        stored = await self.stored_commit(name)
        if stored is None:
            return True
        if judged is not None and judged.crc64nvme != stored.crc64nvme:
            return False
        if is_justified is not None and not await is_justified():
            return False

        async def check() -> None:  # an earlier try may have succeeded, and another node may have committed since
            await self.lease.require_not_fenced()
            now = await self.stored_commit(name)
            is_other = now is not None and now.crc64nvme != stored.crc64nvme
            if is_other or (is_justified is not None and not await is_justified()):
                raise AlreadyExists(keys.commit(name))

        try:
            await self._executor.persistently(self._store.delete, [keys.commit(name)], before_again=check)
        except AlreadyExists:
            return False
        named = await self._named_by(name, stored)
        if await self.stored_commit(name) is not None:  # committed again, or the deletion was damaged on its way
            return False
        await self.delete_while_uncommitted(name, named)
        return True

    async def remove(self, name: str, *, judged: StoredCommit | None = None, is_justified: Justified | None = None) -> bool:
        """Delete a checkpoint with all its objects, in the order of I4. Objects that others delete meanwhile are no error.

        ``judged``, ``is_justified``: as of ``revoke_commit``.

        Returns:
            Whether it was deleted.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            AlreadyExists: The step was committed again meanwhile.
        """
        await self._announce_deletion(name)
        if not await self.revoke_commit(name, judged=judged, is_justified=is_justified):
            return False
        await self._delete_objects(name, await self._executor.persistently(self._modified, name))
        return True

    async def finish_removal(self, name: str) -> bool:
        """Delete what the deletion of a checkpoint has left, if a process ended in the middle of it.

        Returns:
            Whether there was something to delete, and nobody is writing the checkpoint again.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            AlreadyExists: The step was committed again meanwhile.
        """
        key = keys.deletion(name)
        try:
            begun = decode(BegunDeletion, await self._executor.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError, UnusableNow):
            return False
        await self.lease.require_not_fenced()
        left = await self._executor.persistently(self._modified, name)
        if not is_remainder(name, left, before=begun.last_write) or await self.stored_commit(name) is not None:
            return False
        await self._delete_objects(name, left)
        return True

    async def _announce_deletion(self, name: str) -> None:
        """Record that a commit and its objects are to be deleted: if this process ends meanwhile, another one goes on."""
        modified = await self._executor.persistently(self._modified, name)
        at = last_write(modified)
        if keys.commit(name) in modified and at is not None:
            await self.lease.require_not_fenced()
            await self._executor.persistently(self._record_deletion, name, BegunDeletion(last_write=at))

    def _record_deletion(self, name: str, begun: BegunDeletion) -> None:
        with suppress(AccessRefused):  # of a full bucket too: the deletion makes room in it
            self._store.put(keys.deletion(name), encode(begun))

    async def _delete_objects(self, name: str, listed: Collection[str]) -> None:
        manifests = [key for key in listed if attempt_of(key, name) is not None]
        begun = [key for key in listed if key == keys.deletion(name)]
        files = sorted(set(listed) - {*manifests, *begun})
        for objects in (manifests, files, begun):
            if objects:
                await self.delete_while_uncommitted(name, objects)

    def _modified(self, name: str) -> dict[str, str]:
        return {stored.key: stored.modified for stored in self._store.list(keys.folder(name))}

    async def delete_while_uncommitted(self, name: str, objects: Sequence[str]) -> None:
        """Delete objects of a checkpoint. Each retry reads the commit first: objects of a new commit stay.

        Raises:
            AlreadyExists: The step was committed again meanwhile.
        """

        async def check() -> None:
            await self.lease.require_not_fenced()
            if await self.stored_commit(name) is not None:  # committed while the store did not answer
                raise AlreadyExists(keys.commit(name))

        await self._executor.persistently(self._store.delete, objects, before_again=check)
