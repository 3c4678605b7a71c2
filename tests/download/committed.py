"""Committed steps in a store in memory whose way to us can be damaged."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, Commit, FileEntry, Manifest, ManifestEntry, NodeOf, encode
from sidecar.errors import AccessRefused
from sidecar.store.protocol import Readable
from tests.store.memory import MemoryStore
from trainer_hook.contract import Node


class DamagedWay(MemoryStore):
    """Flips a bit of everything that is read of the keys for which ``is_damaged`` holds; what is stored stays whole.

    Keys for which ``is_refused`` holds are not given out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_damaged: Callable[[str], bool] = lambda key: False
        self.is_refused: Callable[[str], bool] = lambda key: False
        self.reads = 0
        """Of bodies and documents."""

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        return self._arrived(key, super().get(key, most_bytes=most_bytes))

    @contextmanager
    def read(self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None) -> Iterator[Readable]:
        with super().read(key, offset=offset, length=length, etag=etag) as body:
            content = bytearray(length or 1 << 20)
            count = body.readinto(memoryview(content))
            yield io.BytesIO(self._arrived(key, bytes(content[:count])))

    def _arrived(self, key: str, content: bytes) -> bytes:
        self.reads += 1
        if self.is_refused(key):
            raise AccessRefused(f"{key}: GetObject was denied (AccessDenied)", code="AccessDenied")
        if not content or not self.is_damaged(key):
            return content
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def commit_step(store: MemoryStore, step: int, *nodes: Mapping[str, bytes], attempt: str = "a") -> None:
    """Write a step of as many nodes as there are mappings of files."""
    name, entries, size_bytes = f"checkpoint-{step}", [], 0
    for index, files in enumerate(nodes):
        node = Node(index, len(nodes))
        named = []
        for number, (path, content) in enumerate(files.items()):
            # As in the store of S3, where "a" and "a/b" can both be: the key says nothing of the path on the volume.
            stored = store.put(keys.node_file(name, attempt, node, f"{number}"), content)
            crc = checksum.text_of(content)
            named.append(
                FileEntry(path=path, key=stored.key, size_bytes=len(content), crc64nvme=crc, etag=stored.etag, part_bytes=0)
            )
            size_bytes += len(content)
        of = NodeOf(index=index, count=len(nodes))
        raw = encode(Manifest(name=name, step=step, attempt=attempt, node=of, files=tuple(named)))
        key = keys.manifest(name, attempt, node)
        store.put(key, raw)
        entries.append(ManifestEntry(key=key, size_bytes=len(raw), crc64nvme=checksum.text_of(raw)))
    count = sum(len(files) for files in nodes)
    commit = Commit(name=name, step=step, attempt=attempt, files=count, size_bytes=size_bytes, manifests=tuple(entries))
    store.put(keys.commit(name), encode(commit))
