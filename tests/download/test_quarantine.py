"""What this node found damaged, and who waits for it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, Quarantined, decode
from sidecar.daemon.services import Services
from sidecar.download import offers
from sidecar.download import quarantine as quarantine_module
from sidecar.download.quarantine import Quarantine, Sharing
from sidecar.download.request import ResumeState
from sidecar.errors import ArchivedObject
from sidecar.store.protocol import Readable
from sidecar.volume.opener import Folder
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import answer, runtime_on


async def test_a_finding_is_not_missed_by_a_wait_that_begins_in_the_same_moment(tmp_path: Path) -> None:
    """Its record was neither written to the store nor deleted there until the next finding."""
    quarantine = Quarantine(Folder(tmp_path) / "quarantine.json")
    waiting = asyncio.ensure_future(quarantine.changed())
    quarantine.add("checkpoint-10", "0" * 16, "damaged")
    async with asyncio.timeout(5.0):
        await waiting


async def shared(services: Services, store: DamagedWay) -> None:
    assert await Sharing(services.quarantine, store, services.executor, node=None).share()


def records(store: DamagedWay) -> list[str]:
    return [stored.key for stored in store.list("checkpoint-20/") if keys.is_quarantine(stored.key, "checkpoint-20")]


@pytest.mark.parametrize("kind", ["a file", "the manifest"])
@pytest.mark.parametrize("by", ["the same sidecar", "the next pod", "the same sidecar, before its finding is in the store"])
async def test_a_missing_object_that_arrives_later_ends_the_quarantine(
    kind: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of a replicated or copied bucket arrive in any order, so its commit can come first."""
    # The etags of this store prove nothing, as S3's do.
    monkeypatch.setattr(offers, "is_content_of", lambda raw, *, size_bytes, etag: len(raw) == size_bytes)
    store = DamagedWay()
    for step in (10, 20):
        commit_step(store, step, {"model": b"m" * 3000})
    ending = "/0" if kind == "a file" else "of-00001.json"
    [late] = [stored.key for stored in store.list("checkpoint-20/") if stored.key.endswith(ending)]
    content = store.get(late)
    store.delete([late])
    services = runtime_on(store, tmp_path / "first")
    first = await answer(services)
    assert first.checkpoint == "checkpoint-10"
    if "before" not in by:
        await shared(services, store)
        assert len(records(store)) == 1
        assert (await answer(services)).passed_over, "it is still missing"
    store.put(late, content)
    if by == "the next pod":
        services = runtime_on(store, tmp_path / "second")
    second = await answer(services)
    assert (second.state, second.checkpoint, second.passed_over) == (ResumeState.READY, "checkpoint-20", ())
    await shared(services, store)
    assert records(store) == []
    assert services.quarantine.quarantined == {}


async def test_an_object_that_is_deleted_during_the_download_and_restored_later_ends_the_quarantine(tmp_path: Path) -> None:
    class Deleting(DamagedWay):
        def read(self, key: str, **part: Any) -> AbstractContextManager[Readable]:
            if key == self.late:
                self.delete([key])
            return super().read(key, **part)

        late = ""

    store = Deleting()
    for step in (10, 20):
        commit_step(store, step, {"model": b"m" * 3000})
    [late] = [stored.key for stored in store.list("checkpoint-20/") if stored.key.endswith("/0")]
    content, store.late = store.get(late), late
    services = runtime_on(store, tmp_path / "volume")
    assert (await answer(services)).checkpoint == "checkpoint-10"
    await shared(services, store)
    assert len(records(store)) == 1
    store.put(late, content)
    store.late = ""
    assert (await answer(services)).checkpoint == "checkpoint-20"
    await shared(services, store)
    assert (records(store), services.quarantine.quarantined) == ([], {})


async def test_other_content_in_the_place_of_a_missing_object_is_quarantined_for_good(tmp_path: Path) -> None:
    store = DamagedWay()
    for step in (10, 20):
        commit_step(store, step, {"model": b"m" * 3000})
    [late] = [stored.key for stored in store.list("checkpoint-20/") if stored.key.endswith("/0")]
    store.delete([late])
    services = runtime_on(store, tmp_path / "first")
    assert (await answer(services)).checkpoint == "checkpoint-10"
    await shared(services, store)
    store.put(late, b"x" * 3000)
    assert [passed.checkpoint for passed in (await answer(services)).passed_over] == ["checkpoint-20"]
    await shared(services, store)
    [record] = records(store)
    assert decode(Quarantined, store.get(record), key=record).missing is None
    reads = store.reads
    assert (await answer(runtime_on(store, tmp_path / "second"))).checkpoint == "checkpoint-10"
    assert store.reads - reads < 12, "nothing of it was downloaded again"


@pytest.mark.parametrize("kind", ["refused", "archived"])
async def test_a_commit_that_cannot_be_read_keeps_no_other_finding_on_this_node(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each other node downloaded the damaged step to find that out, for as long as the first commit stayed unreadable."""

    class Archived(DamagedWay):
        def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
            if key == keys.commit("checkpoint-10") and self.is_archived:
                raise ArchivedObject(key)
            return super().get(key, most_bytes=most_bytes)

        is_archived = False

    monkeypatch.setattr(quarantine_module, "ANSWER_S", 2.0)
    store = Archived()
    services = runtime_on(store, tmp_path / "volume")
    for step in (10, 20):
        commit_step(store, step, {"model": b"m" * 3000})
        name = f"checkpoint-{step}"
        services.quarantine.add(name, checksum.text_of(store.get(keys.commit(name))), "damaged")
    store.is_archived = kind == "archived"
    store.is_refused = lambda key: kind == "refused" and key == keys.commit("checkpoint-10")
    sharing = Sharing(services.quarantine, store, services.executor, node=None)
    assert not await sharing.share()
    assert len(records(store)) == 1
    store.is_archived, store.is_refused = False, lambda key: False
    assert await sharing.share()
    assert len(list(store.list("checkpoint-10/.ckpt/quarantined"))) == 1
