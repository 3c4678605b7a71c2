"""Looks at the store at the instants at which an invariant could break: when a commit was written, and before a deletion.

The store has answered then, or was not asked yet, and the sidecar waits.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from html import unescape

from tests.campaign.published import Published, Version
from tests.campaign.reader import Commit, Reader, step_of
from tests.faults.plan import Kind
from tests.faults.proxy import Dialect, Exchange
from tests.faults.wire import Request

BESIDE_S = 20.0
"""Seconds between a node's look at the commit and the end of a deletion that is slow, with its copies."""
_KEYS = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


@dataclass(frozen=True)
class Written:
    """A commit, as it was when it was written."""

    at_s: float
    """When the request for it came."""
    commit: Commit
    version: Version | None


class Witness(Dialect):
    """Of one prefix."""

    def __init__(self, prefix: str, reader: Reader, published: Published, *, keep: int | None) -> None:
        self._prefix, self._reader, self._published, self._keep = f"{prefix}/", reader, published, keep
        self._lock = threading.Lock()
        self.violations: list[str] = []
        self.seen: Counter[str] = Counter()
        self.written: list[Written] = []
        self.may_be_overwritten = False
        """Nodes of one job go on to the next attempt one after the other."""
        self.knows_all = True
        """Every version is published before it can be committed; else contents are compared at the end."""
        self._flipped: set[str] = set()
        """Steps whose present commit document was changed on its way, and stored by a store that compares no checksums."""
        self._story: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=60))
        """What happened to the documents of each step, for the one who reads a violation."""

    def request_body(self, request: Request, blocks: Iterator[bytes]) -> Iterator[bytes]:
        if request.operation == "DeleteObject":
            self._before_deletion([request.key])
        elif request.operation == "DeleteObjects":
            raw = b"".join(blocks)
            self._before_deletion([unescape(key.decode()) for key in _KEYS.findall(raw)])
            return iter([raw])
        return blocks

    def answered(self, exchange: Exchange) -> None:
        """Look at a commit that the store has just taken (I2, I3)."""
        key = exchange.key.removeprefix(self._prefix)
        if exchange.operation == "PutObject":
            self._tell(key, f"put: {exchange.store_status}, asked {time.monotonic() - exchange.began_s:.2f} s before")
        name = key.removesuffix("/.complete")
        is_commit = key.endswith("/.complete") and exchange.operation == "PutObject" and exchange.store_status == 200
        if not is_commit or "/" in name:
            return
        with self._lock:
            if exchange.fault is not None and exchange.fault.kind is Kind.CORRUPT_UPLOAD:
                # The sidecar compares what the store says with what it sent, and writes it again; the end of the run looks.
                self.seen["commits that were changed on the way"] += 1
                self._flipped.add(name)
                return
            self._flipped.discard(name)
            commit = self._reader.commit(name)
            if commit is None:
                return
            self.seen["commits"] += 1
            version = self._published.of_commit(commit)
            self.written.append(Written(exchange.began_s, commit, version))
            if not commit.is_whole and self.may_be_overwritten and self._published.count(name) > 1:
                # Another node already writes the step anew: between its look and its commit a node cannot know it. The
                # post-commit check mends it, a resume does not take it, and the end of the run reads it again.
                self.seen["commits that a later writing had hit"] += 1
            elif not commit.is_whole:
                self._say(f"I2: {name} was committed, and {'; '.join(commit.problems[:3])}", of=name)
            elif version is None and self.knows_all:
                self._say(f"{name} was committed with content that nobody published", of=name)

    def _before_deletion(self, keys: list[str]) -> None:
        """Look at a deletion before the store is asked for it (I4, I7). Each step is read once, however many objects go."""
        doomed: dict[str, list[str]] = defaultdict(list)
        for key in dict.fromkeys(key.removeprefix(self._prefix) for key in keys if key.startswith(self._prefix)):
            self._tell(key, "deleted")
            doomed[key.split("/")[0]].append(key)
        for name, objects in doomed.items():
            if name != "final" and not name.startswith("checkpoint-"):
                continue
            with self._lock:
                self.seen["deletions"] += len(objects)
                if f"{name}/.complete" in objects:
                    self._before_revocation(name)
                else:
                    self._before_removal(name, objects)

    def _before_removal(self, name: str, objects: list[str]) -> None:
        commit = self._reader.commit(name)
        if commit is None or not commit.is_whole or not (named := [key for key in objects if key in commit.keys]):
            return
        # A commit whose request the store has not answered yet is there, and not among the written ones.
        now_s = time.monotonic()
        written_s = max((its.at_s for its in self.written if its.commit.raw == commit.raw), default=now_s)
        is_beside = now_s - written_s < BESIDE_S and all("/.ckpt/" in key for key in named)
        if self.may_be_overwritten and self._published.count(name) > 1 and is_beside:
            # A node that has seen no commit takes its manifest of an earlier save back, and reads the commit again after that.
            self.seen["manifests taken back beside a commit of them"] += 1
        else:
            self._say(f"I4: {', '.join(named)} is deleted while the commit of {name} names it", of=name)

    def _before_revocation(self, name: str) -> None:
        """Only for another writing, or by retention (I7)."""
        others = [other for other in self._reader.names() if step_of(other) > step_of(name) >= 0]
        is_retention = self._keep is not None and len(others) >= self._keep
        if self._published.count(name) < 2 and not is_retention and name not in self._flipped:
            self._say(f"I7: the commit of {name} is deleted; of higher steps there are {others}", of=name)

    def _tell(self, key: str, what: str) -> None:
        name, _, document = key.partition("/")
        if document == ".complete" or document.startswith(".ckpt/"):
            self._story[name].append(f"{datetime.now(UTC):%H:%M:%S.%f} {document} {what}")

    def _say(self, violation: str, *, of: str) -> None:
        self.violations.append("\n  ".join([violation, *self._story[of]]))
