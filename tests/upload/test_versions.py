"""Which objects of a version an earlier process of the sidecar has sent."""

from __future__ import annotations

from pathlib import Path

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.send.journal import Journal
from sidecar.upload.versions import own_folder_keys
from sidecar.volume.opener import Folder
from tests.store.memory import MemoryStore
from tests.upload.parts import ended, executor, found, transfer, written
from trainer_hook.contract import Node

NAME = "checkpoint-10"


def checkpoint(attempt: str = "a", index: int = 1) -> Finished:
    return Finished(NAME, "v1", 10, None, attempt, Node(index, 2), 1.8e9, None, (), {})


async def test_a_restart_leaves_a_file_in_the_folder_of_its_node(tmp_path: Path) -> None:
    """It was sent again under the shared key, over the other node's file."""
    store, path = MemoryStore(), written(tmp_path / NAME, parts=3)
    own = keys.node_file(NAME, "a", Node(1, 2), path.name)
    with executor(concurrency=2) as threads:
        store.put(keys.shared_file(NAME, path.name), b"of node 0")
        stream, first = Dispatcher(threads), transfer(path, store, threads, journal=tmp_path / "journal")
        first.add([found(path)], moved={path.name: own})
        stream.reorder([first])
        await ended(first)
        again = transfer(path, store, threads, journal=tmp_path / "journal")
        assert own_folder_keys(checkpoint(), again.journal) == {path.name: own}
        again.add([found(path)], moved=own_folder_keys(checkpoint(), again.journal))
        assert [entry.key for entry in await again.finished()] == [own], "nothing is left to send"
    assert store.get(keys.shared_file(NAME, path.name)) == b"of node 0"


def test_a_key_that_is_not_in_the_folder_of_the_node_is_not_kept(tmp_path: Path) -> None:
    """A journal may be written by another program, or be of the time before a marker named its attempt."""
    journal = Journal(Folder(tmp_path) / f"{NAME}@v1.jsonl")
    for path, key in {
        "shared": keys.shared_file(NAME, "shared"),
        "of another node": keys.node_file(NAME, "a", Node(0, 2), "of another node"),
        "of another attempt": keys.node_file(NAME, "b", Node(1, 2), "of another attempt"),
        "own": keys.node_file(NAME, "a", Node(1, 2), "own"),
    }.items():
        journal.stored(FileEntry(path=path, key=key, size_bytes=1, crc64nvme="0" * 16, etag="e"), stamp="1")
    journal.close()
    assert list(own_folder_keys(checkpoint(), journal)) == ["own"]
