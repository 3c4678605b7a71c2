"""Reads the manifests of all nodes of an attempt, each once: alone, or as a bundle (``core/commit/commit_roster``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.core.commit.commit import Reupload
from sidecar.core.format import keys
from sidecar.core.format.manifest import Gathered, Manifest, ManifestBundle, decode_digest, decode_manifest, encode
from sidecar.errors import NotFound
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError, Node, encode_json
from trainer_hook.contract.typed_json import json_object


@dataclass(frozen=True, slots=True)
class Read:
    """A manifest as it is in the store."""

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
        """This node wrote its manifest: it need not be read again."""
        self._known[key] = read

    def is_published(self, key: str, listed: Mapping[str, str]) -> bool:
        """Whether what is listed is what this node wrote, as far as it remembers and the etags tell."""
        known = self._known.get(key)
        return known is None or "" in (known.etag, listed[key]) or known.etag == listed[key]

    async def own(self, key: str) -> Read | None:
        """Return this node's manifest as it published it last, in this life or before."""
        if key not in self._known:
            await self._fetch(key, "")
        return self._known.get(key)

    async def read(self, there: Mapping[str, str], indices: Iterable[int]) -> list[Read]:
        """Return the manifests of some nodes, in order; those that are not there or cannot be read are left out.

        Args:
            there: Etag by key, as listed.
            indices: Of the nodes.
        """
        wanted = [keys.manifest(self._name, self._attempt, Node(index, self._node.count)) for index in indices]
        await self._executor.together(
            [self._fetch(key, there[key]) for key in wanted if key in there and not self._is_known(key, there[key])]
        )
        return [self._known[key] for key in wanted if key in there and key in self._known]

    async def read_digests(self, digests: Sequence[str]) -> None:
        """Take over what digests say; they may be out of date, which the etags show."""
        await self._executor.together([self._take_over(key) for key in digests])

    async def write_digest(self, key: str, reads: Sequence[Read]) -> None:
        """Put the manifests into one object."""
        await self._executor.persistently(self._store.put, key, encode(digest_of(self._name, self._attempt, reads)))

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
            digest = decode_digest(await self._executor.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError):
            return
        for gathered in digest.manifests:
            if not self._is_known(gathered.key, gathered.etag):
                try:
                    manifest = decode_manifest(gathered.text.encode(), key=gathered.key)
                except ContractError:
                    continue
                self._known[gathered.key] = Read(gathered.etag, gathered.text.encode(), manifest)

    # What the node that commits asks of the others, where not everybody reads all manifests.

    async def ask_to_mend(self, mending: Mapping[int, Mapping[str, str]], there: Mapping[str, str]) -> None:
        """Write down what which node has to send again."""
        asked = {}
        for index, files in mending.items():
            etag = there[keys.manifest(self._name, self._attempt, Node(index, self._node.count))]
            asked[str(index)] = {"etag": etag, "files": dict(files)}
        key = keys.mending(self._name, self._attempt)
        await self._executor.persistently(self._store.put, key, encode_json({"format": 1, "nodes": asked}))

    async def asked_to_mend(self, own: Read | None) -> Reupload | None:
        """Return what is asked of this node, if it is about the manifest that it published last."""
        key = keys.mending(self._name, self._attempt)
        try:
            asked = json_object(await self._executor.persistently(self._store.get, key), what=key)["nodes"]
            mine = asked.get(str(self._node.index))
        except (NotFound, ContractError, KeyError, AttributeError):
            return None
        if own is None or not isinstance(mine, dict) or mine.get("etag") != own.etag:
            return None
        paths = {entry.path for entry in own.manifest.files}
        files = {path: key for path, key in mine.get("files", {}).items() if path in paths}
        return Reupload(files, "the node that commits found it missing, or another node uses its name") if files else None


def digest_of(name: str, attempt: str, reads: Iterable[Read]) -> ManifestBundle:
    """Return manifests as one document."""
    gathered = (
        Gathered(
            key=keys.manifest(name, attempt, Node(read.manifest.node.index, read.manifest.node.count)),
            etag=read.etag,
            text=read.raw.decode(),
        )
        for read in reads
    )
    return ManifestBundle(name=name, attempt=attempt, manifests=tuple(gathered))
