"""Verification of stored checkpoints: documents and sizes, then every byte. It reports all problems, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sidecar.core.commit.commit import Object
from sidecar.core.commit.resume import check_manifest, check_node_set, check_paths, newest_first, unlike_listing
from sidecar.core.commit.summary import StoredState, summaries
from sidecar.core.format import checksum, keys
from sidecar.core.format.checkpoint_address import misnamed
from sidecar.core.format.manifest import Commit, FileEntry, Manifest, ManifestEntry, decode_manifest
from sidecar.core.schedule.parts import part_ranges, range_bytes
from sidecar.errors import ArchivedObject, CorruptObject, LaterFormat, NotFound, NothingFound
from sidecar.repository.documents import Documents
from sidecar.repository.manifest_bundle import bundled_manifests
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError, step_of

AT_ONCE = 16
"""Maximum number of concurrent reads."""


class ProblemKind(StrEnum):
    """Kind of a problem."""

    BAD = "bad"
    DOCUMENT = "document"
    """A commit or manifest does not parse, or does not fit the document that names it."""
    MISSING = "missing"
    SIZE = "size"
    CONTENT = "content"
    ARCHIVED = "archived"


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a checkpoint cannot be used."""

    key: str
    kind: ProblemKind
    text: str


@dataclass(slots=True)
class Examined:
    """A checkpoint in the store, with the documents that were read."""

    name: str
    state: StoredState
    objects: int
    size_bytes: int
    commit: Commit | None = None
    crc64nvme: str = ""
    """Checksum of the commit; empty: it could not be read."""
    manifests: list[Manifest] = field(default_factory=list)
    """Those that match the commit."""
    problems: list[Problem] = field(default_factory=list)
    uploaded: list[str] = field(default_factory=list)
    """Keys of manifests that no commit names: nodes whose part of an uncommitted checkpoint is in the store."""

    def files(self) -> list[tuple[int, FileEntry]]:
        """Return all files with the index of their node."""
        return [(m.node.index, entry) for m in self.manifests for entry in m.files]

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each object of its files, by key."""
        return {entry.key: entry.size_bytes for _, entry in self.files()}

    def verdict(self) -> dict[str, Any]:
        """Return the outcome of its verification as JSON shows it."""
        return {
            "checkpoint": self.name,
            "state": self.state.value,
            "is_verified": not self.problems,
            "files": len(self.sizes()),
            "size_bytes": sum(self.sizes().values()),
            "problems": problem_fields(self.problems),
        }

    def fields(self) -> dict[str, Any]:
        """Return it as JSON shows it."""
        commit = self.commit
        fields: dict[str, Any] = {"name": self.name, "step": step_of(self.name), "state": self.state.value}
        if commit is not None:
            fields |= {
                "save_reason": commit.reason,
                "attempt": commit.attempt,
                "created_at": commit.created_at,
                "committed_at": commit.committed_at,
                "node_count": len(commit.manifests),
                "world_size": commit.world_size,
                "meta": commit.meta or None,
                "commit_crc64nvme": self.crc64nvme,
            }
        fields |= {"objects": self.objects, "size_bytes": self.size_bytes, "uploaded": self.uploaded or None}
        fields["files"] = [
            {"path": e.path, "key": e.key, "size_bytes": e.size_bytes, "crc64nvme": e.crc64nvme, "node": node}
            for node, e in self.files()
        ]
        return fields | {"problems": problem_fields(self.problems)}


def problem_fields(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return problems as JSON shows them."""
    return [{"key": p.key, "kind": p.kind.value, "problem": p.text} for p in problems]


class Verifier(Documents):
    """Verifies checkpoints of one prefix."""

    def __init__(self, store: Store, executor: StoreExecutor) -> None:
        super().__init__(store, executor)
        self._requests = asyncio.Semaphore(min(AT_ONCE, executor.most))

    async def committed(self) -> list[str]:
        """Return the names of all checkpoints that may be committed, newest first, with ``final`` at the end."""
        names = await self._executor.persistently(lambda: list(self._store.list_folders()))
        ordered = newest_first(names, and_final=True)
        return sorted(ordered, key=lambda name: step_of(name) is None)

    async def newest_committed(self) -> str:
        """Return the name of the newest committed checkpoint, whole or not.

        Raises:
            NothingFound: There is none.
        """
        for name in await self.committed():
            if await self._is_committed(name):
                return name
        raise NothingFound(f"{self._store.url}: no checkpoint is committed{misnamed(self._store.url)}")

    async def _is_committed(self, name: str) -> bool:
        key = keys.commit(name)
        found = await self._executor.persistently(lambda: [s.key for s in self._store.list(key)])
        return key in found

    async def examine(self, name: str) -> Examined:
        """Read the documents of a checkpoint, and compare them with each other and with the sizes in a listing.

        Raises:
            NothingFound: There is no object of this checkpoint.
        """
        listed = await self._executor.persistently(lambda: list(self._store.list(keys.folder(name))))
        summary = summaries((s.key, s.size_bytes, s.modified) for s in listed).get(name)
        if summary is None:
            raise NothingFound(f"{self._store.url}/{name}: no such checkpoint")
        found = Examined(name, summary.state, summary.objects, summary.size_bytes)
        listing = {s.key: Object(s.size_bytes, s.etag) for s in listed}
        try:
            there = await self.stored_commit(name)
        except ArchivedObject as archived:
            return self._unreadable(found, ProblemKind.ARCHIVED, str(archived))
        except LaterFormat as later:
            return self._unreadable(found, ProblemKind.DOCUMENT, str(later))
        if there is None:
            found.state = StoredState.FOREIGN if summary.state is StoredState.FOREIGN else StoredState.INCOMPLETE
            found.uploaded = [key for key in listing if key.startswith(keys.manifests(name)) and "/node-" in key]
            found.uploaded = [key for key in found.uploaded if key.endswith(".json")]
            return found
        if there.commit is None:
            return self._unreadable(found, ProblemKind.DOCUMENT, there.problem)
        found.state, found.commit, found.crc64nvme = StoredState.COMMITTED, there.commit, there.crc64nvme
        await self._read_quarantine(found, listing)
        await self._read_manifests(found, there.commit)
        self._compare_listing(found, listing)
        return found

    def _unreadable(self, found: Examined, kind: ProblemKind, text: str) -> Examined:
        found.state = StoredState.UNREADABLE
        found.problems.append(Problem(keys.commit(found.name), kind, text))
        return found

    async def _read_quarantine(self, found: Examined, listing: Mapping[str, Object]) -> None:
        why = await self.quarantine_reason(found.name, found.crc64nvme, listing)
        if why is not None:
            found.state = StoredState.BAD
            key = keys.quarantined(found.name, found.crc64nvme)
            found.problems.append(Problem(key, ProblemKind.BAD, f"bad: {why}"))

    async def _read_manifests(self, found: Examined, commit: Commit) -> None:
        bundle = await bundled_manifests(commit, self._store, self._executor)
        read = await self._executor.together([self._read_manifest(entry, bundle.get(entry.key)) for entry in commit.manifests])
        found.manifests = [manifest for manifest in read if isinstance(manifest, Manifest)]
        found.problems += [problem for problem in read if isinstance(problem, Problem)]
        if len(found.manifests) < len(commit.manifests):
            return
        try:
            check_node_set(commit, found.manifests)
            check_paths(commit, (entry for _, entry in found.files()))
        except ContractError as error:
            found.problems.append(Problem(keys.commit(found.name), ProblemKind.DOCUMENT, str(error)))

    async def _read_manifest(self, entry: ManifestEntry, raw: bytes | None) -> Manifest | Problem:
        try:
            if raw is None:
                raw = await self._executor.persistently(lambda: self._store.get(entry.key, most_bytes=entry.size_bytes))
            check_manifest(entry, raw)
            return decode_manifest(raw, key=entry.key)
        except NotFound:
            return Problem(entry.key, ProblemKind.MISSING, f"{entry.key}: missing in the store")
        except ArchivedObject as archived:
            return Problem(entry.key, ProblemKind.ARCHIVED, str(archived))
        except ContractError as error:
            return Problem(entry.key, ProblemKind.DOCUMENT, str(error))

    def _compare_listing(self, found: Examined, listing: Mapping[str, Object]) -> None:
        sizes = {key: there.size_bytes for key, there in listing.items()}
        known = set()
        for entry in unlike_listing(found.manifests, sizes):
            if entry.key in known:
                continue
            known.add(entry.key)
            if entry.key not in sizes:
                found.problems.append(Problem(entry.key, ProblemKind.MISSING, f"{entry.key}: missing in the store"))
            else:
                text = f"{entry.key}: {sizes[entry.key]} bytes in the store, its writer recorded {entry.size_bytes}"
                found.problems.append(Problem(entry.key, ProblemKind.SIZE, text))

    async def read_all(self, found: Examined, on_read: Callable[[int], None]) -> None:
        """Read every byte of the files that the documents name, and add a problem for each that differs.

        ``on_read``: called with the number of bytes that were read, also of a second try.

        Raises:
            StoreError: The store cannot be read now.
        """
        bad = {problem.key for problem in found.problems}
        wanted = {(e.key, e.crc64nvme): e for _, e in found.files() if e.key not in bad}
        problems = await self._executor.together([self._read_file(entry, on_read) for entry in wanted.values()])
        found.problems += [problem for problem in problems if problem is not None]

    async def _read_file(self, entry: FileEntry, on_read: Callable[[int], None]) -> Problem | None:
        got: list[str] = []
        # Twice: bytes that differ at one read and not at the next were damaged on the way.
        while len(got) < 2:
            try:
                got.append(checksum.to_text(await self._crc_of_file(entry, on_read)))
            except NotFound:
                return Problem(entry.key, ProblemKind.MISSING, f"{entry.key}: missing in the store")
            except ArchivedObject as archived:
                return Problem(entry.key, ProblemKind.ARCHIVED, str(archived))
            except CorruptObject as error:
                return Problem(entry.key, ProblemKind.SIZE, str(error))
            if got[-1] == entry.crc64nvme:
                return None
        again = "" if got[0] == got[1] else f", then {got[1]}: the bytes change on the way"
        text = f"{entry.key}: crc64nvme {got[0]}{again}, its writer recorded {entry.crc64nvme}"
        return Problem(entry.key, ProblemKind.CONTENT, text)

    async def _crc_of_file(self, entry: FileEntry, on_read: Callable[[int], None]) -> int:
        ranges: Sequence[tuple[int, int]] = part_ranges(entry.size_bytes, part_bytes=range_bytes(entry.size_bytes))

        async def crc_of(offset: int, length: int) -> tuple[int, int]:
            async with self._requests:
                crc = await self._executor.persistently(self._crc_of_range, entry.key, offset, length)
            on_read(length)
            return crc, length

        return checksum.combined(await self._executor.together([crc_of(*place) for place in ranges]))
