"""Reads the manifests of all nodes of an attempt, each once: alone, or as a bundle (``core/commit/commit_roster``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.core.commit.commit import Reupload
from sidecar.core.format import keys
from sidecar.core.format.manifest import (
    Gathered,
    Manifest,
    ManifestBundle,
    NodeReuploads,
    ReuploadRequest,
    decode,
    decode_manifest,
    decode_reupload_request,
    encode,
)
from sidecar.errors import NotFound
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError, Node


@dataclass(frozen=True, slots=True)
class Read:
    """A manifest in the store, with its etag and bytes."""

    etag: str
    raw: bytes
    manifest: Manifest


class ManifestCollector:
    """The manifests of one attempt of one checkpoint."""

    def __init__(self, store: Store, executor: StoreExecutor, *, name: str, attempt: str, node: Node) -> None:
        self._store = store
        self._executor = executor
        self._name = name
        self._attempt = attempt
        self._node = node
        self._known: dict[str, Read] = {}

    def published(self, key: str, read: Read) -> None:
        """Record the manifest that this node wrote, so that it is not read again."""
        self._known[key] = read

    def is_published(self, key: str, listed: Mapping[str, str]) -> bool:
        """Whether the listed manifest may be the one that this node wrote. True if either etag is unknown."""
        known = self._known.get(key)
        return known is None or "" in (known.etag, listed[key]) or known.etag == listed[key]

    async def own(self, key: str) -> Read | None:
        """Return the manifest that this node published last, by this process or an earlier one; ``None``: there is none."""
        if key not in self._known:
            await self._fetch(key, "")
        return self._known.get(key)

    async def read(self, there: Mapping[str, str], indices: Iterable[int]) -> list[Read]:
        """Return the manifests of some nodes in order; missing and malformed ones are skipped.

        ``there``: etag by key, as listed.
        """
        wanted = [keys.manifest(self._name, self._attempt, Node(index, self._node.count)) for index in indices]
        await self._executor.together(
            [self._fetch(key, there[key]) for key in wanted if key in there and not self._is_known(key, there[key])]
        )
        return [self._known[key] for key in wanted if key in there and key in self._known]

    async def read_bundles(self, bundles: Sequence[str]) -> None:
        """Read manifests from bundles. A bundle may be outdated, which its etags show."""
        await self._executor.together([self._take_over(key) for key in bundles])

    async def write_bundle(self, key: str, reads: Sequence[Read]) -> None:
        """Write manifests as one object."""
        await self._executor.persistently(self._store.put, key, encode(bundle_of(self._name, self._attempt, reads)))

    def _is_known(self, key: str, etag: str) -> bool:
        known = self._known.get(key)
        return known is not None and known.etag == etag != ""

    async def _fetch(self, key: str, etag: str) -> None:
        self._known.pop(key, None)
        try:
            raw = await self._executor.persistently(self._store.get, key)
            self._known[key] = Read(etag, raw, decode_manifest(raw, key=key))
        except (NotFound, ContractError):
            return

    async def _take_over(self, key: str) -> None:
        try:
            bundle = decode(ManifestBundle, await self._executor.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError):
            return
        for gathered in bundle.manifests:
            if not self._is_known(gathered.key, gathered.etag):
                try:
                    manifest = decode_manifest(gathered.text.encode(), key=gathered.key)
                except ContractError:
                    continue
                self._known[gathered.key] = Read(gathered.etag, gathered.text.encode(), manifest)

    # Reupload requests from the node that commits to the others, in jobs whose nodes do not read all manifests.

    async def request_reuploads(self, files_of: Mapping[int, Mapping[str, str]], there: Mapping[str, str]) -> None:
        """Write the request. ``files_of``: files that a node has to upload again (key by path), by index of the node."""
        asked = {}
        for index, files in files_of.items():
            etag = there[keys.manifest(self._name, self._attempt, Node(index, self._node.count))]
            asked[str(index)] = NodeReuploads(etag=etag, files=dict(files))
        key = keys.reupload_request(self._name, self._attempt)
        await self._executor.persistently(self._store.put, key, encode(ReuploadRequest(nodes=asked)))

    async def reupload_request(self, own: Read | None) -> Reupload | None:
        """Return the request to this node, if it refers to the manifest that it published last; ``None``: there is none."""
        key = keys.reupload_request(self._name, self._attempt)
        try:
            raw = await self._executor.persistently(self._store.get, key)
            mine = decode_reupload_request(raw, key=key, name=self._name).nodes.get(str(self._node.index))
        except (NotFound, ContractError):
            return None
        if own is None or mine is None or mine.etag != own.etag:
            return None
        paths = {entry.path for entry in own.manifest.files}
        files = {path: key for path, key in mine.files.items() if path in paths}
        return Reupload(files, "the node that commits found it missing, or another node uses its name") if files else None


def bundle_of(name: str, attempt: str, reads: Iterable[Read]) -> ManifestBundle:
    """Return manifests as one document, the bundle."""
    gathered = (Gathered(key=read.manifest.key, etag=read.etag, text=read.raw.decode()) for read in reads)
    return ManifestBundle(name=name, attempt=attempt, manifests=tuple(gathered))
