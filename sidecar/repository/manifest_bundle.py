"""Manifest bundle: a copy of all manifests next to the commit of a large job, so that two documents are read, not thousands."""

from __future__ import annotations

from sidecar.core.commit.commit_roster import has_bundle
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import Commit, ManifestBundle, decode
from sidecar.errors import StoreError
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError


async def bundled_manifests(commit: Commit, store: Store, executor: StoreExecutor) -> dict[str, bytes]:
    """Return the manifests in a commit's bundle, by key; empty: there is none, as for every small job.

    Manifests whose checksum does not match the commit are left out.
    """
    if not has_bundle(len(commit.manifests)):
        return {}
    key = keys.all_manifests(commit.name, commit.attempt)
    try:
        bundle = decode(ManifestBundle, await executor.persistently(store.get, key), key=key)
    except (StoreError, ContractError):
        return {}
    named = {entry.key: entry.crc64nvme for entry in commit.manifests}
    found = {gathered.key: gathered.text.encode() for gathered in bundle.manifests}
    return {key: raw for key, raw in found.items() if named.get(key) == checksum.text_of(raw)}
