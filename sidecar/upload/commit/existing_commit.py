"""Comparison of a finished checkpoint with the commit of its step in the store: equal, kept, or replaced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from sidecar.core.commit.first_write import taken_keys
from sidecar.core.commit.rewrite import AlreadyCommitted, KeepExisting, Replace, rewrite
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import Commit, FileEntry, Manifest
from sidecar.repository.documents import StoredCommit
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.overwrite_guard import Outdated
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Range
from trainer_hook.contract import rfc3339

log = structlog.get_logger()


class KnownDamage(Protocol):
    """Damaged commits that this pod knows of, and the store does not yet."""

    def reason(self, name: str, crc: str) -> str | None:
        """Return why the commit of a name with a checksum cannot be resumed from; ``None``: nothing is known against it."""
        ...


class Contents(Protocol):
    """Files of a held checkpoint, read for a comparison. Blocking calls."""

    def checksums(self, path: str, ranges: list[Range]) -> list[int]:
        """Return the CRC64NVME of ranges of a file.

        Raises:
            CheckpointChanged, CheckpointRejected: It is another version, or cannot be read.
        """
        ...

    def is_still(self, path: str, ranges: list[Range], wanted: list[int]) -> bool:
        """Whether ranges of a file have these checksums."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """A finished checkpoint beside the commit of its step, with the decision about it as far as it is known."""

    checkpoint: Finished
    stored: StoredCommit
    part: Manifest | None
    """The commit's manifest of this node; ``None``: it has none."""
    files: list[FileEntry] | None
    """Our files with checksums; ``None``: their paths or sizes already differ from those of ``part``."""
    decision: AlreadyCommitted | KeepExisting | Replace
    is_damaged: bool
    """The commit has our content, and its objects are known to be damaged."""

    @property
    def needs_permission(self) -> bool:
        """Whether the lease has to permit the checkpoint before ``conclude``: the commit may be replaced."""
        if isinstance(self.decision, AlreadyCommitted):
            return self.is_damaged
        # A checkpoint that an earlier pod left has no epoch that could change the decision.
        return not (isinstance(self.decision, KeepExisting) and self.checkpoint.is_inherited)


class ExistingCommit:
    """Compares finished checkpoints with commits and manifests of earlier processes and other attempts."""

    def __init__(self, committer: Committer, executor: StoreExecutor, quarantine: KnownDamage) -> None:
        self._committer = committer
        self._executor = executor
        self._quarantine = quarantine
        self._replaced: list[Manifest] = []
        """This node's manifests of the commits that were revoked."""

    async def compare(self, checkpoint: Finished, contents: Contents, stored: StoredCommit) -> Comparison:
        """Compare a checkpoint with the commit of its step. The store is only read."""
        commit = stored.commit
        part = None if commit is None else await self._committer.part(commit, checkpoint.node)
        files = None if part is None else await self._as_entries(checkpoint, contents, part.files)
        decision = self._decision(checkpoint, commit, part, files)
        is_bad = commit is not None and isinstance(decision, AlreadyCommitted) and await self._is_known_bad(commit, stored)
        return Comparison(checkpoint, stored, part, files, decision, is_damaged=is_bad)

    async def conclude(self, found: Comparison) -> AlreadyCommitted | KeepExisting | Replace:
        """Return the decision about a checkpoint whose step is committed. Before ``Replace``, the commit is revoked (I4).

        To be called once the lease permits the checkpoint, if the comparison needs that.

        Raises:
            Outdated: The commit was replaced meanwhile, or must not be replaced now; the upload starts again.
            Fenced: A later pod of the job has taken the prefix over.
        """
        checkpoint, stored, decision = found.checkpoint, found.stored, found.decision
        if found.needs_permission:  # the epoch of the checkpoint may be known now
            is_bad = found.is_damaged
            decision = Replace() if is_bad else self._decision(checkpoint, stored.commit, found.part, found.files)
        if isinstance(decision, Replace):
            await self._revoke_commit(checkpoint, stored)
            self._replaced += [] if found.part is None else [found.part]
        if stored.commit is not None and isinstance(decision, KeepExisting) and not decision.torn:
            await self._revoke_if_damaged(stored.commit, stored)
        return decision

    def _decision(
        self, checkpoint: Finished, commit: Commit | None, part: Manifest | None, files: list[FileEntry] | None
    ) -> AlreadyCommitted | KeepExisting | Replace:
        if commit is None:
            return Replace()
        return rewrite(
            attempt=checkpoint.ordered_as,
            created_at=rfc3339(checkpoint.created_at_s),
            files=files,
            theirs=commit,
            part=part,
            save_id=checkpoint.save_id,
            names_attempt=checkpoint.names_attempt,
            epoch=self._committer.epoch_of(checkpoint),
        )

    async def adopt(
        self, checkpoint: Finished, contents: Contents, journal: Journal, before: Manifest | None, *, but: Collection[str]
    ) -> None:
        """Adopt files of this node's earlier manifest whose content on disk has the recorded checksum.

        Args:
            checkpoint: The checkpoint to send.
            contents: Its files.
            journal: Receives the adopted files, and the keys of the objects of earlier versions.
            before: The manifest; ``None``: this node has written none.
            but: Paths whose objects are known to be damaged.
        """
        earlier = self._replaced if before is None else [*self._replaced, before]
        journal.taken |= taken_keys(checkpoint.name, earlier, damaged=but)
        known = {entry.path: entry for entry in before.files if entry.path not in but} if before else {}
        for file in checkpoint.files:
            entry = known.get(file.path)
            if entry is None or entry.size_bytes != file.size_bytes or file.path in journal.entries:
                continue
            if await self._executor.in_thread(contents.is_still, file.path, [(0, file.size_bytes)], [entry.crc]):
                journal.stored(entry, stamp=file.stamp)

    async def _as_entries(
        self, checkpoint: Finished, contents: Contents, theirs: Sequence[FileEntry]
    ) -> list[FileEntry] | None:
        """Return our files with their checksums; ``None``: paths or sizes already differ."""
        ours = {file.path: file.size_bytes for file in checkpoint.files}
        if ours != {entry.path: entry.size_bytes for entry in theirs}:
            return None
        found = []
        for entry in theirs:
            [crc] = await self._executor.in_thread(contents.checksums, entry.path, [(0, entry.size_bytes)])
            found.append(entry.with_checksum(crc))
        return found

    async def _is_known_bad(self, commit: Commit, stored: StoredCommit) -> bool:
        return (
            self._quarantine.reason(commit.name, stored.crc64nvme) is not None
            or await self._committer.is_quarantined(commit.name, stored.crc64nvme)
            or bool(await self._committer.damaged(commit))
        )

    async def _revoke_commit(self, checkpoint: Finished, stored: StoredCommit) -> None:
        # What may not be committed now replaces nothing. Reading the files may have taken long since that was asked.
        if (reason := await self._committer.lease.reason_not_to_commit(checkpoint.node, checkpoint.attempt)) is not None:
            raise Outdated(reason)
        if not await self._committer.revoke_commit(checkpoint.name, judged=stored):
            raise Outdated(f"another save of {checkpoint.name} was committed meanwhile")

    async def _revoke_if_damaged(self, commit: Commit, stored: StoredCommit) -> None:
        """Revoke a commit of damaged objects: our late requests may have overwritten those of the other attempt."""
        damaged = await self._committer.damaged(commit)
        if damaged:
            hint = "two attempts wrote this step at the same time; an older step is used, and the next one will be durable"
            log.error("commit_taken_back", checkpoint=commit.name, damaged=damaged[:8], hint=hint)
            await self._committer.revoke_commit(commit.name, judged=stored)
