"""Sweeper: removes orphaned objects of earlier versions of a step, once the step is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import structlog

from sidecar.core.commit.commit import Object, attempt_of
from sidecar.core.commit.commit_roster import has_bundle
from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import Manifest, decode_manifest
from sidecar.core.lifecycle.orphan_uploads import is_abandoned, quiet_s
from sidecar.errors import AccessRefused, LaterFormat, NotFound, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError, LaterFormatError

log = structlog.get_logger()


class Sweeper:
    """Removes orphans. Nothing depends on it: the checkpoint is durable already, and orphans only cost storage."""

    def __init__(self, store: Store, executor: StoreExecutor) -> None:
        self._store = store
        self._executor = executor
        self._unswept: dict[tuple[str, str, str | None], tuple[Sequence[Manifest], Mapping[str, Object]]] = {}
        self._is_refused = False
        """The store denies what is needed to abort uploads."""

    def committed(self, checkpoint: Finished, manifests: Sequence[Manifest], before: Mapping[str, Object]) -> None:
        """Record the manifests that this node committed, and the objects of the step just ``before``."""
        self._unswept[checkpoint.name, checkpoint.attempt, checkpoint.save_id] = manifests, before

    async def sweep(self, checkpoint: Finished) -> None:
        """Remove objects that no manifest names, if this node wrote the commit. Not retried: a later save may begin."""
        name, attempt = checkpoint.name, checkpoint.attempt
        manifests, before = self._unswept.pop((name, attempt, checkpoint.save_id), ((), {}))
        if not manifests:
            return
        try:
            await self._remove_unnamed(name, attempt, manifests, before)
        except StoreError as error:
            log.warning(
                "unnamed_objects_not_deleted", checkpoint=name, error=str(error), hint="they are deleted with the checkpoint"
            )
        try:
            await self._executor.once(self._abort_unfinished, name)
        except StoreError as error:
            self._note_unfinished(name, error)

    def _note_unfinished(self, name: str, error: StoreError) -> None:
        """Log that uploads were not aborted; a refusal only once, because it recurs at each commit."""
        if isinstance(error, AccessRefused):
            if self._is_refused:
                return
            self._is_refused = True
        hint = "a later start tries it again, and a lifecycle rule does it, too"
        log.warning("unfinished_upload_not_aborted", checkpoint=name, error=str(error), hint=hint)

    async def _remove_unnamed(
        self, name: str, attempt: str, manifests: Sequence[Manifest], before: Mapping[str, Object]
    ) -> None:
        named = {entry.key for manifest in manifests for entry in manifest.files} | {keys.commit(name)}
        named |= {m.key for m in manifests}
        named |= {keys.all_manifests(name, attempt)} if has_bundle(len(manifests)) else set()
        foreign = [key for key in before if attempt_of(key, name) not in (None, attempt)]
        for key in foreign:
            named |= {key, *await self._files_named_by(key)}
        unnamed = [key for key in before if key not in named]
        if unnamed:
            await self._executor.once(self._store.delete, unnamed)

    async def _files_named_by(self, key: str) -> set[str]:
        # The manifest of another attempt, which may be writing now.
        try:
            manifest = decode_manifest(await self._executor.once(self._store.get, key), key=key)
        except LaterFormatError as later:
            raise LaterFormat(later) from None
        except (NotFound, ContractError):
            return set()
        return {entry.key for entry in manifest.files}

    def _abort_unfinished(self, name: str) -> None:
        for pending in list(self._store.pending_uploads(keys.folder(name))):
            with suppress(NotFound):  # completed or aborted since the listing
                parts = list(self._store.list_parts(pending.key, pending.upload_id))
                stored_at_s = [part.stored_at_s for part in parts]
                silent_s = quiet_s(
                    listed_at_s=pending.listed_at_s, begun_at_s=pending.begun_at_s, parts_stored_at_s=stored_at_s
                )
                if is_abandoned(parts=len(parts), quiet_s=silent_s):
                    self._store.abort_upload(pending.key, pending.upload_id)
