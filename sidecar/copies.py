"""The copy of its manifests that a commit of many nodes has beside it: two documents are read instead of thousands."""

from __future__ import annotations

from sidecar.core import checksum, keys
from sidecar.core.manifest import Commit, decode_digest
from sidecar.errors import StoreError
from sidecar.store.protocol import Store
from sidecar.transfer import Transfers
from trainer_hook.contract import ContractError


async def gathered_in_commit(commit: Commit, store: Store, transfers: Transfers) -> dict[str, bytes]:
    """Return the manifests of a commit that lie in one object beside it, by key; empty where there is none.

    Nothing is taken on trust: only what has the checksum that the commit names.
    """
    key = keys.all_manifests(commit.name, commit.attempt)
    try:
        digest = decode_digest(await transfers.persistently(store.get, key), key=key)
    except (StoreError, ContractError):
        return {}
    named = {entry.key: entry.crc64nvme for entry in commit.manifests}
    found = {gathered.key: gathered.text.encode() for gathered in digest.manifests}
    return {key: raw for key, raw in found.items() if named.get(key) == checksum.to_text(checksum.checksum(raw))}
