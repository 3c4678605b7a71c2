"""Removes what an earlier version of a step left in the store, once the step is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from sidecar.core import keys
from sidecar.core.commit import Object, attempt_of
from sidecar.core.gathering import EAGER_NODES
from sidecar.core.local import Finished
from sidecar.core.manifest import Manifest, decode_manifest
from sidecar.errors import NotFound, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer import Transfers
from trainer_hook.contract import ContractError, Node

log = structlog.get_logger()


class Sweeper:
    """Nothing depends on it: a checkpoint is durable before, and what is not swept only costs money."""

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self._store = store
        self._transfers = transfers
        self._unswept: dict[tuple[str, str, str | None], tuple[Sequence[Manifest], Mapping[str, Object]]] = {}

    def committed(self, checkpoint: Finished, manifests: Sequence[Manifest], before: Mapping[str, Object]) -> None:
        """Take note of what this node committed, and of what lay below the step just ``before``."""
        self._unswept[checkpoint.name, checkpoint.attempt, checkpoint.save_id] = manifests, before

    async def sweep(self, checkpoint: Finished) -> None:
        """Remove what nobody names, where this node wrote the commit. Tried once: it must not come after another writing."""
        name, attempt = checkpoint.name, checkpoint.attempt
        manifests, before = self._unswept.pop((name, attempt, checkpoint.save_id), ((), {}))
        if not manifests:
            return
        try:
            await self._remove_unnamed(name, attempt, manifests, before)
            await self._transfers.once(self._abort_unfinished, name)
        except StoreError as error:
            log.warning("leftovers_not_removed", checkpoint=name, error=str(error), hint="they go with the checkpoint")

    async def _remove_unnamed(
        self, name: str, attempt: str, manifests: Sequence[Manifest], before: Mapping[str, Object]
    ) -> None:
        named = {entry.key for manifest in manifests for entry in manifest.files} | {keys.commit(name)}
        named |= {keys.manifest(name, m.attempt, Node(m.node.index, m.node.count)) for m in manifests}
        named |= {keys.all_manifests(name, attempt)} if len(manifests) > EAGER_NODES else set()
        foreign = [key for key in before if attempt_of(key, name) not in (None, attempt)]
        for key in foreign:
            named |= {key, *await self._files_named_by(key)}
        leftover = [key for key in before if key not in named]
        if leftover:
            await self._transfers.once(self._store.delete, leftover)

    async def _files_named_by(self, key: str) -> set[str]:
        # The manifest of another attempt, which may be at work at this very moment.
        try:
            manifest = decode_manifest(await self._transfers.once(self._store.get, key), key=key)
        except (NotFound, ContractError):
            return set()
        return {entry.key for entry in manifest.files}

    def _abort_unfinished(self, name: str) -> None:
        # The step is committed: whatever is unfinished below it was begun anew since, such as one whose answer was lost.
        for pending in list(self._store.pending_uploads(keys.folder(name))):
            self._store.abort_upload(pending.key, pending.upload_id)
