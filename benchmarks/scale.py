"""Cost of a commit of 1 to 10,000 nodes: requests, bytes, seconds and dollars, with the limits that S3 publishes.

The sidecar's own ``Committer`` runs on every node of a simulated job (``tests/simulation``); the data is there, all nodes end
at the same instant, and only the documents are measured. The store answers 503 to requests beyond its limits.

    python -m benchmarks.scale [--nodes 1,10,100,1000,10000] [--dead 0.0]

Sources: S3 user guide, "Best practices design patterns: optimizing Amazon S3 performance" (3,500 writes and 5,500 reads a
second below a prefix; listings count as reads) and "ListObjectsV2" (1,000 keys a page); prices of us-east-1, S3 Standard.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any
from unittest.mock import patch

from sidecar.core.commit.commit import ReadyToCommit, Reupload, manifest_of
from sidecar.core.format import checksum, keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, FileEntry, decode_commit
from sidecar.errors import StoreUnavailable
from sidecar.repository import documents
from sidecar.store.protocol import Stored
from sidecar.transfer.clock import Clock
from sidecar.upload.commit.committer import Committer
from tests.simulation.world import Faults, Request, Sleep, Together, World
from tests.store.memory import MemoryStore
from trainer_hook.contract import Node

NAME, ATTEMPT = "checkpoint-20", "20270115T080000Z-a1"
FILES = ("__{0}_0.distcp", "rng_state_{0}.pth")
LIMITS_PER_S = {"put": 3500, "get": 5500}
DOLLARS = {"put": 5e-6, "list": 5e-6, "get": 4e-7}
WAY_S = {"put": 0.03, "get": 0.02, "list": 0.08}
"""From request to answer; of a listing: per page."""
PAGE = 1000
THREADS = 20
MOST_S = 120.0


class LimitedStore(MemoryStore):
    """Counts, and answers 503 beyond the limits."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._sorted: list[str] = []
        self._lately: dict[str, deque[float]] = {"put": deque(), "get": deque()}
        self.requests: Counter[str] = Counter()
        self.refused = 0
        self.most_per_s: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.counting = False

    def admit(self, kind: str) -> None:
        limit = "put" if kind == "put" else "get"
        lately, now_s = self._lately[limit], self._world.now_s
        while lately and lately[0] <= now_s - 1:
            lately.popleft()
        self.requests[kind] += 1
        if len(lately) >= LIMITS_PER_S[limit]:
            self.refused += 1
            raise StoreUnavailable("503 SlowDown")
        lately.append(now_s)
        self.most_per_s[limit] = max(self.most_per_s[limit], len(lately))

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        self.admit("get")
        content = super().get(key)
        self.bytes["read"] += len(content)
        return content

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        if self.counting:
            self.admit("put")
            self.bytes["written"] += len(content)
        return super().put(key, content, only_if_absent=only_if_absent)

    def _write(self, key: str, content: bytes) -> Stored:
        if key not in self._objects:
            bisect.insort(self._sorted, key)
        return super()._write(key, content)

    def list(self, prefix: str) -> Iterator[Stored]:
        at = bisect.bisect_left(self._sorted, prefix)
        found = []
        while at < len(self._sorted) and self._sorted[at].startswith(prefix):
            found.append(self._stored(self._sorted[at]))
            at += 1
        for _ in range(self.pages(prefix)):
            self.admit("list")
        return iter(found)

    def pages(self, prefix: str) -> int:
        at = bisect.bisect_left(self._sorted, prefix)
        after = bisect.bisect_left(self._sorted, prefix + "\U0010ffff")
        return max(1, -(-(after - at) // PAGE))

    def delete(self, keys: Iterable[str]) -> None:
        gone = [key for key in keys if key in self._objects]
        for _ in range(-(-len(gone) // PAGE)):
            self.admit("put")
        for key in gone:
            self._sorted.remove(key)
        super().delete(gone)


class SimulatedExecutor:
    """``sidecar.transfer.executor.StoreExecutor`` on the simulated clock, with the same number of threads."""

    def __init__(self, world: World, store: LimitedStore) -> None:
        self._world = world
        self._store = store
        self.gate = self

    def check(self) -> None:
        """Nothing stops a transfer."""

    async def once(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await Sleep(self._way_s(call, args))
        return await Request(functools.partial(call, *args, **kwargs))

    async def persistently(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tries = 0
        while True:
            try:
                return await self.once(call, *args, **kwargs)
            except StoreUnavailable:
                tries += 1
                await Sleep(min(30.0, 0.5 * 2**tries) * self._world.random.random())

    async def together(self, works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        return await Together(works, at_once=THREADS)

    def _way_s(self, call: Callable[..., Any], args: tuple[Any, ...]) -> float:
        name = getattr(call, "__name__", "")
        if name in ("_etags", "_listing"):
            prefix = keys.folder(args[0]) if name == "_listing" else args[0]
            return WAY_S["list"] * self._store.pages(prefix)
        return WAY_S["get" if name == "get" else "put"] * (0.7 + 0.6 * self._world.random.random())


class Fabric(World):
    """No further delays or losses: the transfers have their own delays."""

    def _way_s(self) -> float:
        return 0.0


class Author:
    """A node, for the world."""

    cut_off = (0.0, 0.0)


def simulate(nodes: int, *, dead: float) -> dict[str, Any]:
    """Return the cost of a commit of ``nodes`` nodes, a share of which dies right after writing its manifest."""
    world = Fabric(nodes, Faults())
    store = LimitedStore(world)
    luck = random.Random(nodes)
    seen: dict[str, Any] = {"durable_s": [], "committed_s": None}
    checkpoints = [_part(store, Node(index, nodes)) for index in range(nodes)]
    store.counting = True

    async def live(checkpoint: Finished, entries: list[FileEntry], *, dies: bool) -> None:
        # The part of an executor and of a sleep that a committer uses.
        clock = Clock(monotonic=world.clock, sleep=Sleep)
        committer = Committer(store, SimulatedExecutor(world, store), clock=clock)  # type: ignore[arg-type]
        await committer.publish_manifest(manifest_of(checkpoint, entries))
        if dies:
            return
        while True:
            decision = await committer.try_commit(checkpoint)
            if seen["committed_s"] is None and keys.commit(NAME) in store._objects:
                seen["committed_s"] = world.now_s
            if isinstance(decision, ReadyToCommit):
                seen["durable_s"].append(world.now_s)
                return
            assert not isinstance(decision, Reupload), decision
            await Sleep(1.0)

    for checkpoint, entries in checkpoints:
        dies = luck.random() < dead or (dead > 0 and checkpoint.node.index == 0)
        world.start(Author(), live(checkpoint, entries, dies=dies))
    # Documents that are equal are read once: ten thousand nodes are one process here.
    with (
        patch.object(documents, "decode_commit", functools.lru_cache(4)(decode_commit)),
        patch.object(checksum, "checksum", functools.lru_cache(64)(checksum.checksum)),
    ):
        world.run(MOST_S)
    dollars = sum(store.requests[kind] * price for kind, price in DOLLARS.items())
    return {
        "nodes": nodes,
        "puts": store.requests["put"],
        "gets": store.requests["get"],
        "lists": store.requests["list"],
        "per_node": sum(store.requests.values()) / nodes,
        "written": store.bytes["written"],
        "read": store.bytes["read"],
        "committed_s": seen["committed_s"],
        "all_know_s": max(seen["durable_s"], default=None),
        "most_put_s": store.most_per_s["put"],
        "most_get_s": store.most_per_s["get"],
        "refused": store.refused,
        "dollars": dollars,
    }


def _part(store: LimitedStore, node: Node) -> tuple[Finished, list[FileEntry]]:
    checkpoint = Finished(NAME, "v", 20, None, ATTEMPT, node, 1.8e9, None, (), {}, save_id="1")
    entries = []
    for pattern in FILES:
        path = pattern.format(node.index)
        key, content = keys.shared_file(NAME, path), path.encode()
        crc = checksum.text_of(content)
        etag = store.put(key, content).etag
        entries.append(FileEntry(path=path, key=key, size_bytes=len(content), crc64nvme=crc, etag=etag))
    return checkpoint, entries


def main() -> int:
    """Print a line per size; exit code 1 if a commit took 10 s or a limit was exceeded."""
    arguments = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    arguments.add_argument("--nodes", default="1,10,100,1000,10000")
    arguments.add_argument("--dead", type=float, default=0.0, help="share of nodes that die early, with node 0")
    given = arguments.parse_args()
    print("nodes    PUT    GET   LIST  per node  written MB  read MB  commit s  all know s  PUT/s  GET/s  503  dollars")
    failed = False
    for nodes in (int(count) for count in given.nodes.split(",")):
        got = simulate(nodes, dead=given.dead)
        committed_s, know_s = got["committed_s"], got["all_know_s"]
        print(
            f"{nodes:5} {got['puts']:6} {got['gets']:6} {got['lists']:6} {got['per_node']:9.1f} {got['written'] / 1e6:11.2f} "
            f"{got['read'] / 1e6:8.1f} {committed_s or float('nan'):9.2f} {know_s or float('nan'):11.2f} {got['most_put_s']:6} "
            f"{got['most_get_s']:6} {got['refused']:4} {got['dollars']:8.4f}",
            flush=True,
        )
        failed = failed or committed_s is None or (committed_s >= 10 and not given.dead) or got["refused"] > 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
