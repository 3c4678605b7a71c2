"""Looks at the store after every change, with the eyes of a pod that resumes at that very instant."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.commit.resume import check_listing, check_manifest, check_node_set
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, Commit, decode_commit, decode_manifest
from sidecar.errors import AlreadyExists, NotFound, OversizedDocument
from sidecar.store.protocol import Stored
from sidecar.upload.commit.overwrite_guard import VALID_S
from sidecar.upload.commit.post_commit_check import AFTER_S
from tests.simulation.world import SLOWEST_S, World
from tests.store.memory import MemoryStore
from trainer_hook.contract import ContractError

NAME = "checkpoint-20"
COMMIT = keys.commit(NAME)
Writing = tuple[str, str | None]
"""Attempt and save: one writing of the step by all nodes."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class AuditedCommit:
    """A commit while it stands."""

    commit: Commit | None
    since_s: float
    named: frozenset[str]
    """Keys of everything that it names."""
    sound: bool
    writer: Any = None
    """The process of the sidecar that wrote it."""
    is_touched: bool = False
    """Whether something that it names was written again: with etags of requests nobody can tell that from damage."""
    hit_s: float | None = None
    """When it was damaged first; ``None``: never."""

    @property
    def must_be_repaired(self) -> bool:
        """True if it was damaged before the writer's post-commit check; a surviving node finds that."""
        return self.hit_s is not None and self.hit_s - self.since_s < AFTER_S[0][0] and self.writer.is_alive


@dataclass
class AuditedStore(MemoryStore):
    """A store in memory that checks the invariants at each change."""

    world: World
    contents_of: dict[Writing, dict[int, dict[str, bytes]]]
    """What each node wrote, by writing and node."""
    equal_etags: bool = True
    """Whether the etag is the content's, as MD5 is, or the request's, as with KMS."""
    stored_commit: AuditedCommit | None = None
    history: list[tuple[float, Commit, list[float]]] = field(default_factory=list)
    """Each commit with the time when it was written, and when it was removed."""
    overtaken: int = 0
    """Commits that were on their way while somebody else already wrote the step anew."""
    hits: int = 0
    """Changes of what a sound commit names that nobody could have withdrawn in time."""
    listed_s: dict[Any, float] = field(default_factory=dict)
    """When who looked at all objects first, since the last manifest that it wrote."""
    changed_s: dict[str, float] = field(default_factory=dict)
    read_s: dict[Any, float] = field(default_factory=dict)
    """When who looked last whether there is a commit."""
    _shown: dict[str, Stored] = field(default_factory=dict)
    """Each object as a listing shows it."""

    def __post_init__(self) -> None:
        MemoryStore.__init__(self)

    def list(self, prefix: str) -> Any:
        if not self.world.is_stray and prefix == keys.folder(NAME):
            self.listed_s.setdefault(self.world.acting, self.world.now_s)
        shown = self._shown
        return iter([shown[key] for key in sorted([key for key in shown if key.startswith(prefix)])])

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        if key == COMMIT and not self.world.is_stray:
            self.read_s[self.world.acting] = self.world.now_s
        there = self._objects.get(key)
        if there is None:
            raise NotFound(key)
        if len(there.content) > most_bytes:
            raise OversizedDocument(key, most_bytes=most_bytes, size_bytes=len(there.content))
        return there.content

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        there = self._objects.get(key)
        if only_if_absent and there is not None:
            raise AlreadyExists(key)
        same = there is not None and there.content == content
        stored = self._write(key, content)
        if self.equal_etags:
            etag = self._objects[key].etag = f"md5-{_crc(content)}"
            stored = Stored(key, len(content), etag)
        self._shown[key] = stored
        if self.world.story is not None:
            self.world.tell(f"{self.world.acting} put {key}{' (stray)' if self.world.is_stray else ''} {'=' if same else ''}")
        if re.search(r"/node-[0-9]{5}-of-[0-9]{5}[.]json$", key):
            self.listed_s.pop(self.world.acting, None)
        if key == COMMIT:
            self._committed()
        elif not same or not self.equal_etags:
            self._changed(key)
        return stored

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self._objects:
                continue
            if self.world.story is not None:
                self.world.tell(f"{self.world.acting} delete {key}{' (stray)' if self.world.is_stray else ''}")
            if key == COMMIT:
                self._taken_back()
            del self._objects[key], self._shown[key]
            if key != COMMIT:
                self._changed(key)

    # What is checked.

    def resume(self) -> tuple[Commit, dict[str, bytes]] | None:
        """Return what a pod would load now, by manifest key and path; ``None`` if it would pass the step over."""
        try:
            raw = self._objects[COMMIT].content
            commit = commit_in(raw, key=COMMIT)
            manifests = []
            for entry in commit.manifests:
                document = self._objects[entry.key].content
                check_manifest(entry, document)
                manifests.append(manifest_in(document, key=entry.key))
            check_node_set(commit, manifests)
            check_listing(manifests, {key: len(there.content) for key, there in self._objects.items()})
            loaded = {}
            for manifest in manifests:
                for file in manifest.files:
                    content = self._objects[file.key].content
                    if _crc(content) != file.crc64nvme:
                        return None
                    loaded[f"{manifest.node.index}/{file.path}"] = content
        except (KeyError, ContractError):
            return None
        return commit, loaded

    def _committed(self) -> None:
        world, now_s = self.world, self.world.now_s
        commit = commit_in(self._objects[COMMIT].content, key=COMMIT)
        loaded = self.resume()
        named = {entry.key for entry in commit.manifests}
        for entry in commit.manifests:
            if entry.key in self._objects:
                named |= {file.key for file in manifest_in(self._objects[entry.key].content, key=entry.key).files}
        if loaded is None:
            # I2. Only what changed after its author looked may be missing: nobody can withdraw a request that is on its way.
            looked_s = self.listed_s.get(world.acting, -1.0)
            if not world.is_stray and not any(self.changed_s.get(key, -1.0) >= looked_s for key in self._changed_keys(named)):
                raise Violation(f"I2: {world.acting} committed what was not there")
            self.overtaken += 1
        self.stored_commit = AuditedCommit(commit, now_s, frozenset(named), loaded is not None, world.acting.process)
        if loaded is None:
            self.stored_commit.hit_s = now_s
        self.history.append((now_s, commit, []))
        self._check_content(loaded)

    def _changed_keys(self, named: set[str]) -> set[str]:
        return named | {key for key in self.changed_s if key.startswith(keys.folder(NAME))}

    def _taken_back(self) -> None:
        self.history[-1][2].append(self.world.now_s)
        stored_commit, author = self.stored_commit, self.world.acting
        self.stored_commit = None
        if (
            stored_commit is None
            or stored_commit.commit is None
            or not stored_commit.sound
            or stored_commit.is_touched
            or self.world.is_stray
        ):
            self.hits += self.world.is_stray
            return
        if stored_commit.since_s >= self.read_s.get(author, -1.0):  # on the way of its request
            self.hits += 1
            return
        # I4, I7: a sound commit gives way to what was finished later, and to nothing else.
        if not author.may_replace(stored_commit.commit):
            raise Violation(f"I4: {author} took back a sound commit for nothing")

    def _changed(self, key: str) -> None:
        self.changed_s[key] = self.world.now_s
        stored_commit = self.stored_commit
        if stored_commit is None or key not in stored_commit.named:
            return
        loaded = self.resume()
        self._check_content(loaded)
        if stored_commit.sound and loaded is None:
            # I4: the commit first. A node that did not know of it may be late by its check and its request's time.
            late_s = self.world.issued_s - stored_commit.since_s
            if not self.world.is_stray and late_s > VALID_S + SLOWEST_S:
                raise Violation(f"I4: {self.world.acting} changed {key}, which was committed {late_s:.1f} s before")
            self.hits += 1
            stored_commit.hit_s = self.world.now_s if stored_commit.hit_s is None else stored_commit.hit_s
        stored_commit.sound = loaded is not None
        stored_commit.is_touched = True

    def _check_content(self, loaded: tuple[Commit, dict[str, bytes]] | None) -> None:
        """The first promise: what can be resumed is one writing of the step, whole."""
        if loaded is None:
            return
        commit, files = loaded
        wanted = self.contents_of[commit.attempt, commit.save_id]
        flat = {f"{index}/{path}": content for index, part in wanted.items() for path, content in part.items()}
        if flat != files:
            raise Violation(f"a resume would load {files}, {commit.attempt} save {commit.save_id} wrote {flat}")

    def stood_since(self, since_s: float, key: str, crc: str) -> bool:
        """Whether a commit that names a manifest stood at any time since."""
        return any(
            (not removed or removed[0] >= since_s) and any(e.key == key and e.crc64nvme == crc for e in commit.manifests)
            for _, commit, removed in reversed(self.history)
        )

    def content(self, key: str) -> bytes:
        if key not in self._objects:
            raise NotFound(key)
        return self._objects[key].content

    def close(self) -> None:
        """Forget who looked when."""
        self.listed_s.clear()
        self.read_s.clear()
        self.stored_commit = None


# Documents are frozen, and read the same each time: the sidecar and the audit read equal ones once.
commit_in = functools.lru_cache(512)(decode_commit)
manifest_in = functools.lru_cache(512)(decode_manifest)


@functools.lru_cache(4096)
def _crc(content: bytes) -> str:
    return checksum.text_of(content)
