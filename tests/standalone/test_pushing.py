"""What a push that was interrupted does when it is continued."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from sidecar.core.format import keys
from sidecar.core.format.manifest import FileEntry
from sidecar.standalone.directory import SourceDirectory
from sidecar.standalone.pushing import _DirectoryVersions, _dispatch
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.schedule.queue import Active
from sidecar.volume.opener import Folder
from sidecar.volume.pins import held_as
from tests.standalone.conftest import checkpoint
from tests.store.memory import MemoryStore
from tests.upload.parts import executor, uploads
from trainer_hook.contract import Node


async def test_a_continued_push_leaves_a_file_in_the_folder_of_its_node(tmp_path: Path) -> None:
    """It was sent again under the shared key, over the other node's file."""
    store, path, node = MemoryStore(), checkpoint(tmp_path, 10, {"model": b"of node 1"}), Node(1, 2)
    (path / ".complete").write_text(json.dumps({"attempt": "a", "node": {"index": 1, "count": 2}}))
    own, shared = keys.node_file(path.name, "a", node, "model"), keys.shared_file(path.name, "model")
    store.put(shared, b"of node 0")

    async def push(moved: dict[str, str]) -> list[FileEntry]:
        with executor(concurrency=2) as threads:
            context, source = uploads(store, threads), SourceDirectory(path, path.name)
            finished = await source.read(store.key_limits)
            context.reuploads.ask(finished, moved)
            place = Folder(tmp_path) / f"{held_as(finished.name, finished.version)}.jsonl"
            versions = _DirectoryVersions(context, source, place)
            active = Active(context.catalog.finished(finished, held=False))
            guard = OverwriteGuard(context.committer, finished.name, finished.attempt, node=node)
            dispatching = asyncio.create_task(_dispatch(context, active))
            try:
                async with versions.taken_over(active, finished) as sent:
                    return await versions.send(active, finished, await versions.hold(finished), sent, guard)
            finally:
                dispatching.cancel()

    assert [entry.key for entry in await push({"model": own})] == [own]
    assert [entry.key for entry in await push({})] == [own], "another process, which was not asked to move it"
    assert store.get(shared) == b"of node 0"
