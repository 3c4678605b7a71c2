"""What the store holds already of a step that is to be sent: the same, something that stays, or something that makes way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import structlog

from sidecar.core.local import Finished
from sidecar.core.manifest import Commit, FileEntry, Manifest
from sidecar.core.rewrite import Keep, Replace, Same, rewrite
from sidecar.transfer import Transfers
from sidecar.upload.bodies import Bodies, Source
from sidecar.upload.committing import Committer, Standing
from sidecar.upload.fence import Outdated
from sidecar.upload.journal import Journal
from trainer_hook.contract import rfc3339

log = structlog.get_logger()


class AlreadyThere:
    """Compares finished checkpoints with commits and manifests of earlier lives and other attempts."""

    def __init__(
        self,
        committer: Committer,
        transfers: Transfers,
        bodies: Callable[[str, Source], Bodies],
        *,
        is_quarantined: Callable[[str], bool],
    ) -> None:
        self._committer = committer
        self._transfers = transfers
        self._bodies = bodies
        self._is_quarantined = is_quarantined

    async def decide(self, checkpoint: Finished, source: Source, there: Standing) -> Same | Keep | Replace:
        """Return what becomes of a checkpoint whose step is committed; way is made for one that replaces it (I4).

        Raises:
            Outdated: Another commit took the place of this one meanwhile: it is to be asked again.
        """
        name, commit = checkpoint.name, there.commit
        if commit is None:
            await self._make_way(name, there)
            return Replace()
        part = await self._committer.part(commit, checkpoint.node)
        files = await self._as_entries(checkpoint, source, part.files) if part is not None else None
        created_at = rfc3339(checkpoint.created_at_s)
        decision = rewrite(
            attempt=checkpoint.attempt,
            created_at=created_at,
            files=files,
            theirs=commit,
            part=part,
            save_id=checkpoint.save_id,
        )
        if isinstance(decision, Same) and (self._is_quarantined(name) or await self._committer.damaged(commit)):
            decision = Replace()
        if isinstance(decision, Replace):
            await self._make_way(name, there)
        if isinstance(decision, Keep) and not decision.torn:
            await self._take_back_if_damaged(commit, there)
        return decision

    async def adopt(
        self, checkpoint: Finished, source: Source, journal: Journal, before: Manifest | None, *, but: Collection[str]
    ) -> None:
        """Take over files of our own earlier manifest: those whose content on disk has the checksum recorded then.

        Args:
            checkpoint: What is to be sent.
            source: Its files.
            journal: Gets what is taken over.
            before: The manifest, if this node has written one.
            but: Paths whose object is known not to be what the manifest says.
        """
        known = {entry.path: entry for entry in before.files if entry.path not in but} if before else {}
        bodies = self._bodies(checkpoint.name, source)
        for file in checkpoint.files:
            entry = known.get(file.path)
            if entry is None or entry.size_bytes != file.size_bytes or file.path in journal.entries:
                continue
            if await self._transfers.once(bodies.is_still, file.path, [(0, file.size_bytes)], [entry.crc]):
                journal.stored(entry, stamp=file.stamp)

    async def _as_entries(self, checkpoint: Finished, source: Source, theirs: Sequence[FileEntry]) -> list[FileEntry] | None:
        """Return our files with their checksums, or ``None`` when paths and sizes tell already that they are others."""
        ours = {file.path: file.size_bytes for file in checkpoint.files}
        if ours != {entry.path: entry.size_bytes for entry in theirs}:
            return None
        bodies = self._bodies(checkpoint.name, source)
        found = []
        for entry in theirs:
            [crc] = await self._transfers.once(bodies.checksums, entry.path, [(0, entry.size_bytes)])
            found.append(entry.with_checksum(crc))
        return found

    async def _make_way(self, name: str, there: Standing) -> None:
        if not await self._committer.make_way(name, judged=there):
            raise Outdated(f"another writing of {name} was committed meanwhile")

    async def _take_back_if_damaged(self, commit: Commit, there: Standing) -> None:
        """Better invisible than broken: our last requests may have hit what the other attempt had just committed."""
        damaged = await self._committer.damaged(commit)
        if damaged:
            hint = "two attempts wrote this step at the same time; an older step is used, and the next one will be durable"
            log.error("commit_taken_back", checkpoint=commit.name, damaged=damaged[:8], hint=hint)
            await self._committer.make_way(commit.name, judged=there)
