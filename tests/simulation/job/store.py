"""The store of a job: looks at itself after every change, with the eyes of a pod that resumes at that very instant."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from sidecar.core.format import keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.errors import AlreadyExists, NotFound
from sidecar.retention.store_retention import SETTLED_S
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.upload.commit.committer import LEASE_VALID_S
from sidecar.upload.commit.overwrite_guard import VALID_S
from tests.simulation.job import reader
from tests.simulation.job.loop import Process
from tests.simulation.job.order import AttemptOrder
from tests.simulation.job.world import World
from tests.simulation.world import SLOWEST_S
from tests.store.memory import MemoryStore

FLIGHT_S = 60.0
"""Longest time from a node's last look to the arrival of its deletion, with all that is lost and tried again."""

Writing = tuple[str, str, str | None]
"""Step, attempt and save: one writing of a step by all nodes."""


@dataclass
class CommitLife:
    """A commit from when it was written until it was removed."""

    name: str
    commit: reader.Named
    since_s: float
    sound_since_s: float | None
    """``None``: it is not whole now."""
    until_s: float = 0.0
    """When it was whole last, if it is not now."""
    removed_s: float | None = None
    is_touched: bool = False
    """Something that it names was written again: with etags of requests nobody can tell that from damage."""
    is_damaged: bool = False
    """The schedule damaged it in the store."""

    @property
    def is_sound(self) -> bool:
        return self.sound_since_s is not None

    def names(self, key: str) -> bool:
        return key in self.commit.files or key in self.commit.manifests

    def was_seen_whole(self, now_s: float) -> bool:
        """Whether a node that deletes something now may have found it whole after it had settled."""
        last_s = now_s if self.is_sound else self.until_s
        return last_s >= max(self.since_s + SETTLED_S, now_s - FLIGHT_S)


@dataclass(frozen=True)
class Ability:
    """What kind of store it is."""

    conditional_put: bool = True
    verification: Verification = Verification.STORE_CRC
    equal_etags: bool = True
    """Whether the etag is the content's, as MD5 is, or the request's, as with KMS."""


@dataclass
class JobStore(MemoryStore):
    """A store in memory that checks the invariants at each change."""

    world: World
    ability: Ability
    attempts: AttemptOrder
    written: dict[Writing, dict[int, dict[str, bytes]]] = field(default_factory=dict)
    """What the trainer of each node wrote."""
    contents: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, CommitLife] = field(default_factory=dict)
    """The present commits, by step."""
    history: list[CommitLife] = field(default_factory=list)
    known_uploads: dict[str, Process] = field(default_factory=dict)
    """Who began which upload, and knows it."""
    hits: int = 0
    """Changes of what a whole commit names that nobody could have withdrawn in time."""
    overtaken: int = 0
    """Commits that were on their way while somebody else already wrote the step anew."""
    deleted: int = 0
    """Commits that retention deleted."""

    def __post_init__(self) -> None:
        MemoryStore.__init__(self)
        self._hidden: dict[str, float] = {}
        self._written_s: dict[str, float] = {}
        self._begun_s: dict[str, float] = {}
        self._completed: dict[tuple[str, str], str] = {}
        self._listed_s: dict[tuple[Any, str], float] = {}
        """When who looked at all objects of a step first, since the last manifest that it wrote."""
        self._read_s: dict[tuple[Any, str], float] = {}
        self._changed_s: dict[str, dict[str, float]] = {}

    def probe(self) -> Capabilities:
        return Capabilities(
            self.ability.verification,
            conditional_put=self.ability.conditional_put,
            min_part_bytes=1,
            max_parts=10_000,
            conditional_files=self.ability.conditional_put,
        )

    def _stored(self, key: str) -> Stored:
        """Return an object with the time of its write by the store's clock, as a folder tells it."""
        at_s = self._written_s.get(key, self.world.now_s)
        return replace(super()._stored(key), modified=f"{round(at_s * 1e9):020}")

    # Reading.

    def _is_hidden(self, key: str) -> bool:
        until_s = self._hidden.get(key)
        return until_s is not None and until_s > self.world.now_s

    def _was_hidden(self, life: CommitLife) -> bool:
        """Whether the store said at some time since a commit that there is none."""
        return self._hidden.get(reader.commit_key(life.name), -1.0) > life.since_s

    def _refuse_hidden(self, key: str) -> None:
        if self._is_hidden(key):
            self.world.counts["hidden"] += 1
            raise NotFound(key)

    def stat(self, key: str) -> Stored:
        self._refuse_hidden(key)
        return super().stat(key)

    @contextmanager
    def read(self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None) -> Iterator[Readable]:
        self._refuse_hidden(key)
        with super().read(key, offset=offset, length=length, etag=etag) as body:
            yield body

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        if (key.endswith("/.complete") or key == keys.RUN) and not self.world.is_stray:
            self._read_s[self.world.acting, key.partition("/")[0]] = self.world.now_s
        self._refuse_hidden(key)
        return super().get(key, most_bytes=most_bytes)

    def list(self, prefix: str) -> Iterator[Stored]:
        name = prefix.partition("/")[0]
        if not self.world.is_stray and prefix == keys.folder(name):
            self._listed_s.setdefault((self.world.acting, name), self.world.now_s)
        found = [key for key in self._objects if key.startswith(prefix) and not self._is_hidden(key)]
        return iter([self._stored(key) for key in sorted(found)])

    def list_folders(self) -> Iterator[str]:
        return iter(sorted({key.split("/", 1)[0] for key in self._objects if "/" in key and not self._is_hidden(key)}))

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        now_s = self.world.epoch()
        found = super().pending_uploads(prefix)
        return iter([replace(u, begun_at_s=self._begun_s[u.upload_id], listed_at_s=now_s) for u in found])

    # Writing.

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        if only_if_absent and key in self._objects and not self._misses(key):
            raise AlreadyExists(key)
        return self._write(key, content)

    def _misses(self, key: str) -> bool:
        """Whether a store without conditional writes, where the client looks before it writes, lets a write through."""
        if self.ability.conditional_put:
            return False
        return self.world.now_s - self._written_s[key] < SLOWEST_S and self.world.random.random() < 0.5

    def _write(self, key: str, content: bytes) -> Stored:
        world = self.world
        before = self.contents.get(key)
        stored = super()._write(key, content)
        if self.ability.equal_etags:
            self._objects[key].etag = f"md5-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
            stored = replace(stored, etag=self._objects[key].etag)
        self.contents[key] = content
        self._written_s[key] = world.now_s
        if before is None and world.faults.hidden and world.random.random() < world.faults.hidden:
            self._hidden[key] = world.now_s + world.faults.hidden_s * world.random.random()
        self._say("put", key, " =" if before == content else "")
        if key == keys.RUN:
            self.attempts.declared(content, now_s=world.now_s, is_stray=world.is_stray)
        life: Any = world.acting
        self.attempts.written(key, None if life is None or world.is_stray else life.pod.attempt, now_s=world.now_s)
        name = key.partition("/")[0]
        if re.search(r"/node-[0-9]{5}-of-[0-9]{5}[.]json$", key):
            self._listed_s.pop((world.acting, name), None)
        if key == reader.commit_key(name):
            if before != content:
                self._committed(name)
        elif before != content or not self.ability.equal_etags:
            self._changed(name, key)
        return stored

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self._objects:
                continue
            self._say("delete", key)
            name = key.partition("/")[0]
            if key == reader.commit_key(name):
                self._taken_back(name)
            del self._objects[key], self.contents[key]
            self._hidden.pop(key, None)
            if key != reader.commit_key(name):
                self._changed(name, key)

    def begin_upload(self, key: str) -> str:
        upload_id = super().begin_upload(key)
        self._begun_s[upload_id] = self.world.epoch()
        return upload_id

    def write_part(self, key: str, upload_id: str, number: int, content: bytes) -> Part:
        part = Part(number, len(content), hashlib.blake2b(content, digest_size=8).hexdigest(), stored_at_s=self.world.epoch())
        self._upload(key, upload_id).parts[number] = part, content
        return part

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:
        stored = super().complete_upload(key, upload_id, parts, crc64nvme=crc64nvme)
        stored = self._stored(key)
        self._completed[key, upload_id] = stored.etag
        return stored

    def completed(self, key: str, upload_id: str) -> Stored | None:
        """Return the object that an upload was completed to, while it is the one that is there."""
        etag = self._completed.get((key, upload_id))
        there = self._objects.get(key)
        return self._stored(key) if etag is not None and there is not None and there.etag == etag else None

    def _say(self, what: str, key: str, more: str = "") -> None:
        if self.world.story is not None:
            self.world.tell(f"{self.world.acting} {what} {key}{more}{' (stray)' if self.world.is_stray else ''}")

    # What is checked at each change.

    def _check_fence(self, name: str, commit: reader.Named) -> None:
        world = self.world
        if world.is_stray or world.acting is None or world.faults.hidden:
            return
        why = self.attempts.why_too_late(commit, decided_s=world.issued_s - LEASE_VALID_S - 2 * SLOWEST_S)
        if why is not None:
            world.violate(f"{world.acting} commits {name}: {why}")
        pod: Any = world.acting
        read_s = self._read_s.get((pod, keys.RUN), 0.0)
        if pod.node.index > 0 and self.attempts.is_undeclared(commit.attempt, read_s=read_s):
            world.violate(f"{pod} commits {name} of {commit.attempt}, which the holder has not declared")

    def _committed(self, name: str) -> None:
        now_s, world = self.world.now_s, self.world
        if (before := self.commits.pop(name, None)) is not None:  # no conditional writes
            self._ended(before)
        commit = reader.named(self.contents, name)
        if commit is None:
            return
        self._check_fence(name, commit)
        loaded = reader.whole(self.contents, name)
        is_whole = loaded is not None or self._is_quarantined(name)
        if not is_whole:
            # I2. Only what changed after its author looked may be missing: nobody can withdraw a request that is on its way.
            looked_s = self._listed_s.get((world.acting, name), -1.0)
            changed = self._changed_s.get(name, {})
            if not world.is_stray and not any(at_s >= looked_s for at_s in changed.values()):
                world.violate(f"I2: {world.acting} committed {name}, and not all of it was there")
            self.overtaken += 1
        life = CommitLife(name, commit, now_s, now_s if is_whole else None)
        self.commits[name] = life
        self.history.append(life)
        self._check_content(loaded)

    def _is_quarantined(self, name: str) -> bool:
        prefix = f"{name}/.ckpt/quarantined-{reader.crc64nvme(self.contents[reader.commit_key(name)])}"
        return f"{prefix}.json" in self.contents

    def _ended(self, life: CommitLife) -> None:
        if life.is_sound:
            life.sound_since_s, life.until_s = None, self.world.now_s
        life.removed_s = self.world.now_s

    def _taken_back(self, name: str) -> None:
        life, world = self.commits.pop(name, None), self.world
        if life is None:
            return
        was_sound = life.is_sound and not self._is_quarantined(name)
        self._ended(life)
        if not was_sound or life.is_touched or world.is_stray or world.acting is None:
            self.hits += was_sound
            return
        if life.since_s >= self._read_s.get((world.acting, name), -1.0):  # on the way of its request
            self.hits += 1
            return
        pod: Any = world.acting
        # I4, I7: a whole commit gives way to what was finished later, or to enough newer ones.
        if not pod.may_replace(name, life.commit):
            self._check_retention(name, pod.keep_store)

    def _check_retention(self, name: str, keep: int | None) -> None:
        now_s, step = self.world.now_s, reader.step_of(name)
        if keep is None:
            self.world.violate(f"I4: {self.world.acting} took back {name}, which was whole, for nothing")
            return
        newer = {s.name for s in self.history if reader.step_of(s.name) > step and s.was_seen_whole(now_s)}
        self.deleted += 1
        if len(newer) < keep:
            self.world.violate(f"I7: {self.world.acting} deleted {name}, and of {keep} newer ones only {newer} were whole")

    def _changed(self, name: str, key: str) -> None:
        now_s, world = self.world.now_s, self.world
        self._changed_s.setdefault(name, {})[key] = now_s
        life = self.commits.get(name)
        if life is None or not life.names(key):
            return
        loaded = reader.whole(self.contents, name)
        self._check_content(loaded)
        if life.is_sound and loaded is None:
            # I4: the commit first. A node that did not know of it may be late by its check and its request's time.
            late_s = world.issued_s - life.since_s
            if not world.is_stray and world.acting is not None and late_s > VALID_S + SLOWEST_S and not self._was_hidden(life):
                world.violate(f"I4: {world.acting} changed {key}, which was committed {late_s:.1f} s before")
            self.hits += 1
            life.until_s = now_s
        if loaded is None:
            life.sound_since_s = None
        elif life.sound_since_s is None:
            life.sound_since_s = now_s
        life.is_touched = True

    def _check_content(self, loaded: reader.Whole | None) -> None:
        """The first promise: what can be resumed is one writing of the step, whole, byte for byte."""
        if loaded is None:
            return
        wanted = self.written.get((loaded.name, loaded.attempt, loaded.save_id))
        if wanted != loaded.files:
            self.world.violate(
                f"a resume would load {loaded.files} as {loaded.name}, {loaded.attempt} save {loaded.save_id} wrote {wanted}"
            )

    # What pods say is checked against it.

    def stood(self, name: str, index: int, files: Mapping[str, bytes], since_s: float) -> bool:
        """Whether a commit that holds a node's files stood at any time since."""
        return any(
            life.name == name and (life.removed_s is None or life.removed_s >= since_s) and self._part(life, index) == files
            for life in reversed(self.history)
        )

    def holds(self, name: str, attempt: str, save_id: str | None, index: int, files: Mapping[str, bytes]) -> bool:
        """Whether a whole commit holds a node's files of one save now."""
        life = self.commits.get(name)
        is_whole = life is not None and life.is_sound and (life.commit.attempt, life.commit.save_id) == (attempt, save_id)
        return life is not None and is_whole and self._part(life, index) == files

    def _part(self, life: CommitLife, index: int) -> Mapping[str, bytes] | None:
        parts = self.written.get((life.name, life.commit.attempt, life.commit.save_id), {})
        return parts.get(index)

    def newest_whole_since(self, since_s: float) -> int | None:
        """Return the newest step that was whole at any instant since a time."""
        steps = [
            reader.step_of(s.name)
            for s in self.commits.values()
            if s.sound_since_s is not None and s.sound_since_s <= since_s and not self._is_quarantined(s.name)
        ]
        return max(steps, default=None)
